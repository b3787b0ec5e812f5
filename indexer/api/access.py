"""Who asks, and what that caller may see and do.

Purpose: with keys configured every request but those of probes needs a bearer token. The keyring finds whose it is,
`AccessControl` refuses what the key is not for, and handlers ask the `Caller` about tenants.

Invariants: nothing of a request is read or looked up before its token is known (401) and its key has the role (403);
nothing of a tenant before the caller is known to see it (403 where the request names the tenant; as if it did not exist
where it names something else). All keys are compared with in constant time, at every look. Neither tokens nor their
digests are logged, or in any error.

If broken: a tenant would learn what another one sends to its engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from indexer.api.errors import ApiError
from indexer.keys import Key, Role, digest_of

PROBES = frozenset({"/healthz", "/readyz", "/health"})
"""What orchestrators ask, who have no key: these tell of no tenant."""

WHOLE_FLEET = frozenset({"/metrics", "/v1/audit"})
"""Routes that tell of all tenants at once: for keys that are bound to none."""

ADMIN = frozenset({"/v1/audit", "/dump"})
ASKING = frozenset({"/v1/explain"})
"""POSTs that only ask, and so are for every role, beside the queries (query_route.py)."""

CHALLENGE = {"www-authenticate": 'Bearer realm="kv-indexer"'}


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenants`: all that this caller may see and change; None = every tenant."""

    tenants: frozenset[str] | None = None
    role: Role = Role.ADMIN

    def sees(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants

    def require(self, tenant: str, field: str = "tenant") -> None:
        """Before anything is looked up, so that not even the time tells what exists. Raises ApiError 403."""
        if not self.sees(tenant):
            raise ApiError(403, "tenant_forbidden", f"this key is not for tenant {tenant!r}", field)

    def require_role(self, role: Role) -> None:
        """Raises ApiError 403."""
        if self.role < role:
            raise ApiError(403, "forbidden_role", f"this needs a key with the role {role}; this one has {self.role}")

    def require_all_tenants(self) -> None:
        """Raises ApiError 403."""
        if self.tenants is not None:
            raise ApiError(403, "tenant_forbidden", "this tells of all tenants; this key is bound to some")


ANYONE = Caller()


def caller_of(request: Request) -> Caller:
    """Anyone where no keys are configured."""
    caller = request.scope.get("caller", ANYONE)
    assert isinstance(caller, Caller)
    return caller


def holds_of(request: Request) -> Callable[[], bool]:
    """Whether that caller is still who it was: keys are taken back, or bound to other tenants. For answers that do not
    end by themselves."""
    holds: Callable[[], bool] = request.scope.get("caller_holds", _always)
    return holds


def _always() -> bool:
    return True


class LastCaller:
    """Who a connection was found to be of: it says so again with every request."""

    __slots__ = ("caller", "header", "keyring_version")

    def __init__(self) -> None:
        self.header = b""
        self.caller: Caller | None = None
        self.keyring_version = 0


class Keyring:
    """The keys in force. Cost: 1 us, and 0.2 us a key, for each look; 0.3 us if it is the same as the last time."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        self._version = 0
        self.replace(keys)

    def replace(self, keys: Iterable[Key]) -> None:
        """From now on these; nothing that was found before counts."""
        self._callers = [(key.digest, Caller(key.tenants, key.role)) for key in keys]
        self._version += 1

    def find(self, header: bytes) -> Caller | None:
        """`header`: the value of `authorization`. None = no token, or nobody's."""
        scheme, _, token = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest, found = digest_of(token.strip(b" ")), None
        for known, caller in self._callers:
            if compare_digest(known, digest):
                found = caller
        return found

    def find_again(self, header: bytes, last: LastCaller) -> Caller | None:
        """The same; `last` remembers it."""
        if last.keyring_version != self._version or not compare_digest(header, last.header):
            last.header, last.caller, last.keyring_version = header, self.find(header), self._version
        return last.caller


class AccessControl:
    """ASGI, around all routes: refuses (401, 403), and tells handlers who calls. `queries`: paths of query routes."""

    def __init__(self, app: ASGIApp, keyring: Keyring, queries: Iterable[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._queries = frozenset(queries)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            header = _token_header(scope)
            scope["caller"] = caller = self._authenticate(header)
            scope["caller_holds"] = lambda: self._keyring.find(header) == caller
            path = scope["path"].removesuffix("\n")  # routers match the same
            caller.require_role(role_needed(scope["method"], path, self._queries))
            if path in WHOLE_FLEET:
                caller.require_all_tenants()
        await self._app(scope, receive, send)

    def _authenticate(self, header: bytes) -> Caller:
        """Raises ApiError 401."""
        caller = self._keyring.find(header)
        if caller is None:
            challenge = {"www-authenticate": CHALLENGE["www-authenticate"] + ', error="invalid_token"'}
            raise ApiError(401, "unauthenticated", "there is no key for this token", headers=challenge)
        return caller


def _token_header(scope: Scope) -> bytes:
    """Of several none is right. Raises ApiError 401."""
    headers: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if not headers:
        raise ApiError(401, "unauthenticated", "this needs a header authorization: Bearer TOKEN", headers=CHALLENGE)
    return headers[0] if len(headers) == 1 else b""


def describe_access(document: dict[str, Any], queries: Iterable[str]) -> None:
    """Into an OpenAPI document: the bearer token, the role that each route needs, and both refusals."""
    document.setdefault("components", {})["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "The token of a key (`kv-indexer key new`)."}
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    refusals = {
        "401": {"description": "No token, or nobody's", "content": content},
        "403": {"description": "The key has not the role, or is not for the tenant", "content": content},
    }
    for path in document["paths"].keys() - PROBES:
        for method, operation in document["paths"][path].items():
            operation["security"] = [{"key": []}]
            operation["x-role"] = str(role_needed(method.upper(), path, queries))
            operation["responses"] |= refusals


def role_needed(method: str, path: str, queries: Iterable[str]) -> Role:
    """To change something is for `operate`; so a new route that only asks, but by POST, has to be named (ASKING)."""
    if path in ADMIN:
        return Role.ADMIN
    return Role.QUERY if method in ("GET", "HEAD") or path in ASKING or path in queries else Role.OPERATE
