"""The client over TLS."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from indexer.client import Reason
from tests.certificates import CertificateFiles, make_certificate
from tests.client_stand_ins import HostileServer, driven, name_addresses

ENOUGH_S = 20.0
TOKENS = list(range(49))
KINDS = pytest.mark.parametrize("kind", ["sync", "async", "uvloop"])


class TlsServer(HostileServer):
    def __init__(self, files: CertificateFiles) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.cert, files.key)
        super().__init__()
        self.url = self.url.replace("http:", "https:")

    def _serve(self, connection: socket.socket) -> None:
        try:
            secured = self._context.wrap_socket(connection, server_side=True)
        except OSError:
            return  # the client did not trust us
        super()._serve(secured)


@KINDS
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("trusted", ["authority", "cert"])
def test_a_server_that_is_vouched_for_answers_on_one_connection(
    kind: str, host: str, trusted: str, tmp_path: Path
) -> None:
    files = make_certificate(tmp_path, host)
    with TlsServer(files) as server:
        url = server.url.replace("127.0.0.1", host)
        with driven(kind, url, ca_file=getattr(files, trusted), deadline_s=ENOUGH_S) as client:
            for _ in range(5):
                assert client.prefix_hits("m", TOKENS).scores() == {"w": 32}
            assert server.connections == 1
            server.close_connections()
            assert client.prefix_hits("m", TOKENS).scores() == {"w": 32}


@KINDS
def test_a_server_that_nobody_vouches_for_is_not_asked(kind: str, tmp_path: Path) -> None:
    with TlsServer(make_certificate(tmp_path)) as server, driven(kind, server.url, deadline_s=ENOUGH_S) as client:
        answer = client.prefix_hits("m", TOKENS)
        assert answer.reason is Reason.UNREACHABLE
        assert answer.failure is not None
        assert "certificate" in answer.failure.message
        assert server.requests == []


@KINDS
def test_a_certificate_for_another_name_is_trusted_only_if_that_is_said(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name_addresses(monkeypatch, "127.0.0.1")
    files = make_certificate(tmp_path)
    with TlsServer(files) as server:
        url = server.url.replace("127.0.0.1", "index.example")
        with driven(kind, url, ca_file=files.authority, deadline_s=ENOUGH_S) as client:
            failure = client.prefix_hits("m", TOKENS).failure
            assert failure is not None
            assert (failure.reason, server.requests) == (Reason.UNREACHABLE, [])
            assert "index.example" in failure.message
        with driven(kind, url, ca_file=files.authority, any_name=True, deadline_s=ENOUGH_S) as client:
            assert client.prefix_hits("m", TOKENS).is_signal
