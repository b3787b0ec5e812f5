"""How a client of the HTTP API shows who it is, and knows whom it talks to. Nothing but the standard library."""

from __future__ import annotations

import ssl
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from indexer.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Credentials:
    """`token`: of a key. `ca_file`: certificates to trust in the place of the system's, also a server's own.
    `is_any_name`: its certificate may be for another name than that of the URL."""

    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    is_any_name: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"authorization": f"Bearer {self.token}"}

    def opener(self) -> urllib.request.OpenerDirector:
        """Uses no proxies. Raises SettingsError."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.ca_file is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self._tls(self.ca_file)))
        return urllib.request.build_opener(*handlers)

    def _tls(self, ca_file: Path) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError("ca_file", f"{ca_file} holds no certificates that can be read: {error}") from error
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = not self.is_any_name
        return context


NO_CREDENTIALS = Credentials()
