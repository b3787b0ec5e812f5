"""Who asks, and what that caller may see."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from indexer.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenants`: all that this caller may see and change; None = every tenant."""

    tenants: frozenset[str] | None = None

    def sees(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants

    def require(self, tenant: str, field: str = "tenant") -> None:
        """Before anything is looked up, so that not even the time tells what exists. Raises ApiError 403."""
        if not self.sees(tenant):
            raise ApiError(403, "tenant_forbidden", f"this key is not for tenant {tenant!r}", field)


ANYONE = Caller()


def caller_of(request: Request) -> Caller:
    """Anyone where no keys are configured."""
    caller = request.scope.get("caller", ANYONE)
    assert isinstance(caller, Caller)
    return caller
