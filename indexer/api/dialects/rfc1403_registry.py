"""Who is registered, in the words of RFC #1403."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from indexer.api.access import Caller
from indexer.api.dialects.rfc1403_bodies import RegisterBody, UnregisterBody
from indexer.api.errors import ApiError
from indexer.api.formats import check_json, decode, is_msgpack
from indexer.api.ports import Services
from indexer.api.publishers import checked_endpoint, register_for, unknown_publisher
from indexer.api.slices import giving_way
from indexer.index.scope import Scope
from indexer.registration import POOL_OPTION, Registration

LORA_OPTION = "lora_name"
TYPES = {"vllm": "vLLM", "sglang": "SGLang", "mooncake": "Mooncake"}  # by our name of the engine

_read_register = msgspec.json.Decoder(RegisterBody).decode
_read_unregister = msgspec.json.Decoder(UnregisterBody).decode
_read_binary_register = msgspec.msgpack.Decoder(RegisterBody).decode
_read_binary_unregister = msgspec.msgpack.Decoder(UnregisterBody).decode

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class Rfc1403Registry:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def register(self, body: bytes, content_type: str | None, caller: Caller) -> dict[str, object]:
        fields = _read_fields(content_type, _read_register, _read_binary_register, body)
        caller.require(fields.tenant, "tenant_id")
        registration = to_registration(self._services, fields)
        await register_for(caller, self._services.registry, registration, "instance_id")
        return {"status": "registered successfully", "instance_id": fields.instance_id}

    async def unregister(self, body: bytes, content_type: str | None, caller: Caller) -> dict[str, object]:
        fields = _read_fields(content_type, _read_unregister, _read_binary_unregister, body)
        caller.require(fields.tenant, "tenant_id")
        removed = []
        for rank in self._ranks(fields):
            await self._services.registry.unregister(fields.instance_id, rank, caller.sees)
            removed.append(f"{fields.instance_id}|{fields.tenant}|{rank}")
        if not removed:
            raise unknown_publisher(fields.instance_id, fields.dp_rank)
        return {"status": "unregistered successfully", "removed_instances": removed}

    async def services(self, caller: Caller) -> dict[str, object]:
        """Sorted by instance and rank."""
        registrations = (followed.registration for followed in self._services.registry.followed())
        seen = sorted((r for r in registrations if caller.sees(r.tenant)), key=lambda r: r.key)
        found = [describe_service(registration) async for registration in giving_way(seen)]
        return {"count": len(found), "services": found}

    async def global_view(self, caller: Caller) -> dict[str, object]:
        """Sorted by tenant and model."""
        scopes = [(names, scope) for names, scope in self._services.index.scopes() if caller.sees(names[0])]
        contexts: list[dict[str, object]] = []
        for (tenant, model), scope in scopes:
            contexts += describe_contexts(tenant, model, scope)
            await asyncio.sleep(0)
        return {"context_count": len(contexts), "contexts": contexts}

    def _ranks(self, fields: UnregisterBody) -> list[int]:
        """Of this instance, tenant and model that are registered, or the one that is asked for."""
        return sorted(
            followed.registration.dp_rank
            for followed in self._services.registry.followed()
            if followed.registration.worker_id == fields.instance_id
            and followed.registration.tenant == fields.tenant
            and fields.modelname in (None, "", followed.registration.model)
            and fields.dp_rank in (None, followed.registration.dp_rank)
        )


def _read_fields(
    content_type: str | None, as_json: Callable[[bytes], BodyT], as_msgpack: Callable[[bytes], BodyT], body: bytes
) -> BodyT:
    if is_msgpack(content_type):
        return decode("msgpack", as_msgpack, body)
    check_json(content_type)
    return decode("JSON", as_json, body)


def to_registration(services: Services, fields: RegisterBody) -> Registration:
    """A store master owns blocks for all of the model. Raises ApiError 422."""
    engine = fields.type.lower()
    if engine not in TYPES:
        raise ApiError(422, "invalid_value", f"type: must be vLLM, SGLang or Mooncake, not {fields.type!r}", "type")
    for field in ("additionalsalt", "additional_salt"):
        if getattr(fields, field):
            raise ApiError(422, "invalid_value", f"{field} is not supported", field)
    replay = fields.replay_endpoint
    options: dict[str, object] = {POOL_OPTION: None} if engine == "mooncake" else {}
    if fields.lora_name:
        options[LORA_OPTION] = fields.lora_name
    return Registration(
        worker_id=fields.instance_id,
        dp_rank=fields.dp_rank,
        model=fields.modelname,
        endpoint=checked_endpoint("endpoint", fields.endpoint, services.normalise_endpoint),
        replay_endpoint=checked_endpoint("replay_endpoint", replay, services.normalise_endpoint) if replay else None,
        tenant=fields.tenant,
        engine=engine,
        block_size=fields.block_size,
        options=options,
    )


# ---------------------------------------------------------------------- what is registered


def describe_service(registration: Registration) -> dict[str, object]:
    adapter = registration.options.get(LORA_OPTION)
    return {
        "Endpoint": registration.endpoint,
        "ReplayEndpoint": registration.replay_endpoint or "",
        "Type": TYPES.get(registration.engine, registration.engine),
        "ModelName": registration.model,
        "LoraName": adapter if isinstance(adapter, str) else "",
        "TenantID": registration.tenant,
        "InstanceID": registration.worker_id,
        "BlockSize": registration.block_size,
        "DPRank": registration.dp_rank,
        "AdditionalSalt": "",
    }


def describe_contexts(tenant: str, model: str, scope: Scope) -> list[dict[str, object]]:
    """One for each size of blocks; prefixes are those that anybody holds. Cost: 1 us a publisher."""
    ranks: dict[int | None, dict[str, list[int]]] = {}
    for publisher in sorted(scope.publishers, key=lambda p: p.registration.key):
        if not publisher.is_pool:
            size = publisher.granule or publisher.registration.block_size
            worker_id, dp_rank = publisher.registration.key
            ranks.setdefault(size, {}).setdefault(worker_id, []).append(dp_rank)
    return [
        {
            "model_name": model,
            "lora_name": "",
            "block_size": size,
            "tenant_id": tenant,
            "prefix_count": scope.spaces[size].held_keys if size in scope.spaces else 0,
            "instances": by_instance,
        }
        for size, by_instance in sorted(ranks.items(), key=lambda item: item[0] or 0)
    ]
