"""The certificate of the HTTP API."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from indexer.errors import SettingsError
from indexer.settings import Settings


class Certificate:
    """A certificate and its private key, as files; `context` serves them. Raises SettingsError that names the file."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self.files = cert_file, key_file
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        _load(*self.files, [self.context])

    def reload(self) -> None:
        """For connections from now on. Raises SettingsError: what was served before stays."""
        _load(*self.files, [ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), self.context])


def configured_certificate(settings: Settings) -> Certificate | None:
    """None = plain HTTP. Raises SettingsError."""
    cert_file, key_file = settings.tls_cert_file, settings.tls_key_file
    if cert_file is None and key_file is None:
        return None
    if cert_file is None or key_file is None:
        given, missing = ("tls_cert_file", "tls_key_file") if key_file is None else ("tls_key_file", "tls_cert_file")
        raise SettingsError(missing, f"{missing} is needed, too: {given} alone says nothing")
    return Certificate(cert_file, key_file)


def _load(cert_file: Path, key_file: Path, contexts: Sequence[ssl.SSLContext]) -> None:
    """The same into each, however the files change meanwhile: a context that refuses them is broken, so a new one goes
    first. From copies that only we can read, since OpenSSL takes files only."""
    certificate, key = _read("tls_cert_file", cert_file), _read("tls_key_file", key_file)
    try:
        with NamedTemporaryFile() as cert_copy, NamedTemporaryFile() as key_copy:
            for copy, content in ((cert_copy, certificate), (key_copy, key)):
                copy.write(content)
                copy.flush()
            for context in contexts:
                context.load_cert_chain(cert_copy.name, key_copy.name, password="")  # none: asking for one would block
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {key_file} does not belong to the certificate in {cert_file}"
            raise SettingsError("tls_key_file", message) from error
        message = (
            f"{cert_file} and {key_file} are no certificate and its unencrypted key as PEM: {error.reason or error}"
        )
        raise SettingsError("tls_cert_file", message) from error
    except OSError as error:
        message = f"{cert_file} and {key_file} cannot be copied to be loaded: {error.strerror}"
        raise SettingsError("tls_cert_file", message) from error


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(setting, f"{setting} {path} cannot be read: {error.strerror}") from error
