"""The service against its own OpenAPI document, by Schemathesis: no fault of ours, and no answer that is not in it.

What is asked is the same in every run. Every route of the document is asked; of an answer without an end the first
event is read. Not checked is that all that fits the document is accepted: it cannot say what an endpoint must be like,
or that one field contradicts another.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from indexer.api.access import Keyring
from indexer.http_server import HttpServer
from indexer.index.content_index import ContentIndex
from indexer.keys import new_key
from tests.e2e.service_process import Engine, ServiceProcess
from tests.unit.api.stand_ins import application

TOKENS = list(range(1, 33))
TOKEN, KEY = new_key("test", "admin")
KEYRING = Keyring([KEY])


def bounded(examples: int) -> Any:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def document(keyring: Keyring | None = None) -> Any:
    """Without the schemas of streams, which would be taken for those of their events."""
    described = application(ContentIndex(), keyring).openapi()
    for operations in described["paths"].values():
        for operation in operations.values():
            operation["responses"].get("200", {}).get("content", {}).get("text/event-stream", {}).pop("schema", None)
    loaded = schemathesis.openapi.from_dict(described)
    loaded.config.max_stream_events = 1
    return loaded


@schemathesis.serializer("application/msgpack")
def to_msgpack(_: Any, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return b"\xc1"  # of what cannot be said in it: no msgpack at all


@schemathesis.deserializer("application/msgpack")
def from_msgpack(_: Any, response: Any) -> Any:
    return msgspec.msgpack.decode(response.content)


@pytest.fixture(scope="module")
def service(shared_data_dir: Path) -> Iterator[ServiceProcess]:
    """That follows an engine, which holds something."""
    with ServiceProcess(shared_data_dir) as service, Engine("http://10.0.0.7:8000") as engine:
        service.wait_until_ready()
        assert engine.register(service)[0] == 201
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS)
        engine.wait_until_applied(service)
        yield service


@pytest.fixture(scope="module")
def url_with_keys() -> Iterator[str]:
    """Of the application alone, which asks for a key."""
    app, stopped, loop = application(ContentIndex(), KEYRING), asyncio.Event(), asyncio.new_event_loop()

    async def serve(server: HttpServer) -> None:
        serving = asyncio.create_task(server.serve())
        await stopped.wait()
        await server.close()
        await serving

    with HttpServer(app, "127.0.0.1", 0, app.direct) as server:
        thread = threading.Thread(target=loop.run_until_complete, args=[serve(server)])
        thread.start()
        yield server.url
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
    loop.close()


@document().parametrize()
@bounded(20)
def test_every_answer_is_in_the_document(case: Any, service: ServiceProcess) -> None:
    case.call_and_validate(base_url=service.url, excluded_checks=[positive_data_acceptance])


with_keys = document(KEYRING)
with_keys.config.phases.coverage.enabled = False  # as above: here it is the keys that matter


@with_keys.auth()
class AsAdmin:
    def get(self, _: Any, __: Any) -> str:
        return TOKEN

    def set(self, case: Any, token: str, _: Any) -> None:
        case.headers["Authorization"] = f"Bearer {token}"


@with_keys.parametrize()
@bounded(5)
def test_so_it_is_with_keys(case: Any, url_with_keys: str) -> None:
    """And nothing but probes is answered without one."""
    case.call_and_validate(base_url=url_with_keys, excluded_checks=[positive_data_acceptance])
