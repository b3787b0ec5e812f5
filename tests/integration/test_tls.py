"""Queries over HTTPS: answered by the server itself, whole and in pieces."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from indexer.api.access import Keyring
from indexer.cli import ask
from indexer.errors import ServiceError
from indexer.http_server import HttpServer
from indexer.index.content_index import ContentIndex
from indexer.keys import new_key
from indexer.settings import Settings
from indexer.tls import Certificate, configured_certificate
from tests.certificates import make_certificate
from tests.unit.api.stand_ins import application

TOKEN, KEY = new_key("a", "query")
LONG = 200_000  # tokens: more than a record of TLS, and than the buffer of a connection
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


def query(tokens: int) -> bytes:
    body = json.dumps({"model": "none", "token_ids": list(range(tokens))}).encode()
    lines = [b"POST /v1/prefix-hits HTTP/1.1", b"host: x", b"authorization: Bearer " + TOKEN.encode()]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


async def serving(folder: Path, talk: Any) -> tuple[Any, int]:
    """What came of it, and how many queries the server answered itself."""
    files = make_certificate(folder)
    app = application(ContentIndex(), Keyring([KEY]))
    answer, answered = app.direct.answer, 0

    def counted(*arguments: Any) -> Any:
        nonlocal answered
        answered += 1
        return answer(*arguments)

    app.direct.answer = counted  # type: ignore[method-assign]
    tls = Certificate(files.cert, files.key).context
    with HttpServer(app, "127.0.0.1", 0, app.direct, tls=tls) as server:
        assert server.url.startswith("https://127.0.0.1:")
        task = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(30):
                return await talk(server.url, files), answered
        finally:
            await server.close()
            await task


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("tokens", [1, 3_000, 20_000, LONG])
def test_queries_are_answered_directly(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tokens: int, tmp_path: Path
) -> None:
    async def talk(url: str, files: Any) -> list[int]:
        context = ssl.create_default_context(cafile=files.authority)
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        counts = []
        for _ in range(3):
            writer.write(query(tokens))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            body = await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
            counts.append(json.loads(body)["prompt_tokens"])
        writer.close()
        return counts

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        counts, direct = runner.run(serving(tmp_path, talk))
    assert counts == [tokens] * 3
    assert direct == (0 if tokens == LONG else 3)


def test_clients_trust_the_authority_or_the_certificate_itself(tmp_path: Path) -> None:
    async def talk(url: str, files: Any) -> None:
        for ca_file in (files.authority, files.cert):
            body = {"model": "none", "token_ids": [1]}
            answer = await asyncio.to_thread(ask, url, "POST", "/v1/prefix-hits", body, api_key=TOKEN, ca_file=ca_file)
            assert answer["prompt_tokens"] == 1
        others = make_certificate(tmp_path / "others")
        for ca_file in (None, others.authority):
            with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
                await audit(url, api_key=TOKEN, ca_file=ca_file)
        with pytest.raises(ServiceError, match="answered 401"):
            await audit(url, ca_file=files.authority)
        with pytest.raises(ServiceError):
            await audit(url.replace("https", "http"))

    asyncio.run(serving(tmp_path, talk))


def test_another_name_is_trusted_only_if_that_is_said(tmp_path: Path) -> None:
    async def talk(url: str, files: Any) -> None:
        named = url.replace("127.0.0.1", "localhost")
        with pytest.raises(ServiceError, match="Hostname mismatch"):
            await audit(named, api_key=TOKEN, ca_file=files.cert)
        with pytest.raises(ServiceError, match="answered 403"):
            await audit(named, api_key=TOKEN, ca_file=files.cert, any_name=True)

    asyncio.run(serving(tmp_path, talk))


async def audit(url: str, **settings: Any) -> None:
    await asyncio.to_thread(ask, url, "GET", "/v1/audit", None, 10, **settings)


def test_without_files_it_is_plain_http() -> None:
    assert configured_certificate(Settings()) is None
