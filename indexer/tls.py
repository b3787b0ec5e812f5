"""The certificate of the HTTP API."""

from __future__ import annotations

import ssl
from pathlib import Path

from indexer.errors import SettingsError
from indexer.settings import Settings


class Certificate:
    """A certificate and its private key, as files; `context` serves them. Raises SettingsError that names the file."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self.files = cert_file, key_file
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        _load(self.context, *self.files)

    def reload(self) -> None:
        """For connections from now on. If the files are not right, what was served before stays."""
        _load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), *self.files)
        _load(self.context, *self.files)


def configured_certificate(settings: Settings) -> Certificate | None:
    """None = plain HTTP. Raises SettingsError."""
    cert_file, key_file = settings.tls_cert_file, settings.tls_key_file
    if cert_file is None and key_file is None:
        return None
    if cert_file is None or key_file is None:
        given, missing = ("tls_cert_file", "tls_key_file") if key_file is None else ("tls_key_file", "tls_cert_file")
        raise SettingsError(missing, f"{missing} is needed, too: {given} alone says nothing")
    return Certificate(cert_file, key_file)


def _load(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    for setting, path in (("tls_cert_file", cert_file), ("tls_key_file", key_file)):
        try:
            path.read_bytes()
        except OSError as error:
            raise SettingsError(setting, f"{setting} {path} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(cert_file, key_file, password="")  # none: asking for one would wait for a terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {key_file} does not belong to the certificate in {cert_file}"
            raise SettingsError("tls_key_file", message) from error
        message = (
            f"{cert_file} and {key_file} are no certificate and its unencrypted key as PEM: {error.reason or error}"
        )
        raise SettingsError("tls_cert_file", message) from error
