"""A certificate whose files change while they are read."""

from __future__ import annotations

import ssl
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexer.errors import SettingsError
from indexer.tls import Certificate
from tests.certificates import CertificateFiles, make_certificate


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return make_certificate(tmp_path / "files")


def served(context: ssl.SSLContext) -> bytes:
    """The certificate that a client gets, after a whole handshake."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def certificate_in(files: CertificateFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.cert.read_text())


def test_what_was_tried_is_what_is_served(files: CertificateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the key is damaged as soon as the new context has it."""
    certificate = Certificate(*files[1:])

    class TriedContext(ssl.SSLContext):
        def load_cert_chain(self, *arguments: Any, **options: Any) -> None:
            super().load_cert_chain(*arguments, **options)
            files.key.write_text("nonsense")

    make_certificate(files.cert.parent)
    new = certificate_in(files)
    assert served(certificate.context) != new
    monkeypatch.setattr(ssl, "create_default_context", lambda _: TriedContext(ssl.PROTOCOL_TLS_SERVER))
    certificate.reload()
    monkeypatch.undo()
    assert served(certificate.context) == new
    with pytest.raises(SettingsError, match="no certificate"):
        certificate.reload()
    assert served(certificate.context) == new


def test_files_that_vanish_once_they_are_read_are_served(
    files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(*files[1:])
    make_certificate(files.cert.parent)
    new, read = certificate_in(files), Path.read_bytes

    def read_last(path: Path) -> bytes:
        content = read(path)
        path.unlink()
        return content

    monkeypatch.setattr(Path, "read_bytes", read_last)
    certificate.reload()
    assert served(certificate.context) == new


def test_copies_are_for_us_alone_and_do_not_stay(
    files: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, load = tmp_path / "copies", ssl.SSLContext.load_cert_chain
    modes: list[int] = []
    copies.mkdir()

    def noting_modes(*arguments: Any, **options: Any) -> None:
        modes.extend(stat.S_IMODE(copy.stat().st_mode) for copy in copies.iterdir())
        load(*arguments, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", noting_modes)
    certificate = Certificate(*files[1:])
    files.key.write_text("nonsense")
    with pytest.raises(SettingsError):
        certificate.reload()
    assert modes == [0o600] * 4
    assert not list(copies.iterdir())


@pytest.mark.parametrize("load", [Certificate.reload, lambda certificate: Certificate(*certificate.files)])
def test_where_nothing_can_be_copied_that_is_said(
    files: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Certificate], Any]
) -> None:
    certificate = Certificate(*files[1:])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="cannot be copied to be loaded: No such file"):
        load(certificate)
