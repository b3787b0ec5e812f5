"""What a service can start with, and what it notices later."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from indexer import guard
from indexer.errors import SettingsError
from indexer.guard import Guard
from indexer.keys import new_key
from indexer.metrics import Metrics
from indexer.settings import Settings
from tests.certificates import make_certificate

TOKEN, KEY = new_key("a", "query")
OTHER_TOKEN, OTHER_KEY = new_key("b", "admin", ["t"])


def refused(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("indexer_access_files_refused_total") or 0.0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "2001:db8::1"])
def test_an_address_that_others_reach_needs_keys_or_a_word(host: str) -> None:
    with pytest.raises(SettingsError, match="--insecure"):
        Guard(Settings(host=host), Metrics())
    assert Guard(Settings(host=host, insecure=True), Metrics()).keyring is None
    assert Guard(Settings(host=host, api_keys=SecretStr(str(KEY))), Metrics()).keyring is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost", "not a name"])
def test_on_loopback_there_need_be_no_keys(host: str) -> None:
    assert Guard(Settings(host=host), Metrics()).keyring is None


def test_keys_hold_although_it_may_be_insecure() -> None:
    assert Guard(Settings(insecure=True, api_keys=SecretStr(str(KEY))), Metrics()).keyring is not None


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    files, others = make_certificate(tmp_path / "a"), make_certificate(tmp_path / "b")
    nothing, encrypted = tmp_path / "none.pem", tmp_path / "encrypted.pem"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    assert Guard(Settings(tls_cert_file=files.cert, tls_key_file=files.key), Metrics()).tls is not None
    for cert, key, words in [
        (files.cert, None, "tls_key_file is needed, too"),
        (None, files.key, "tls_cert_file is needed, too"),
        (nothing, files.key, "tls_cert_file .*none.pem cannot be read: No such file"),
        (files.cert, nothing, "tls_key_file .*none.pem cannot be read: No such file"),
        (files.cert, others.key, "does not belong to the certificate"),
        (files.key, files.key, "no certificate"),
        (files.cert, files.cert, "no certificate and its unencrypted key"),
        (files.cert, encrypted, "no certificate and its unencrypted key"),
    ]:
        with pytest.raises(SettingsError, match=words):
            Guard(Settings(tls_cert_file=cert, tls_key_file=key), Metrics())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def replace(path: Path, text: str) -> None:
    """At once, as tools do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LOOK_INTERVAL_S", 0.01)
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")

    async def run() -> None:
        metrics = Metrics()
        kept = Guard(Settings(api_keys_file=path), metrics)
        keyring = kept.keyring
        assert keyring is not None
        watching = asyncio.create_task(kept.watch())

        def opens(token: str) -> bool:
            return keyring.find(f"Bearer {token}".encode()) is not None

        assert (opens(TOKEN), opens(OTHER_TOKEN)) == (True, False)
        replace(path, f"{KEY}\n{OTHER_KEY}\n")
        await until(lambda: opens(OTHER_TOKEN))
        assert opens(TOKEN)
        replace(path, "nonsense")
        await until(lambda: refused(metrics) == 1)
        assert opens(TOKEN), "what held before stays"
        path.unlink()
        await until(lambda: refused(metrics) == 2)
        replace(path, f"{OTHER_KEY}\n")
        await until(lambda: not opens(TOKEN))
        assert opens(OTHER_TOKEN)
        watching.cancel()

    asyncio.run(run())


def test_a_certificate_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LOOK_INTERVAL_S", 0.01)
    files = make_certificate(tmp_path)

    async def run() -> None:
        metrics = Metrics()
        kept = Guard(Settings(tls_cert_file=files.cert, tls_key_file=files.key), metrics)
        assert kept.tls is not None
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=kept.tls)
        watching = asyncio.create_task(kept.watch())
        port = server.sockets[0].getsockname()[1]

        async def served() -> bytes:
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return certificate

        first = await served()
        replace(files.key, "nonsense")
        await until(lambda: refused(metrics) > 0)
        assert await served() == first
        make_certificate(tmp_path)
        async with asyncio.timeout(20):
            while await served() == first:
                pass
        watching.cancel()
        server.close()

    asyncio.run(run())
