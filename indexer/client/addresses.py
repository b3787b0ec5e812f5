"""Where an endpoint is: its URL, read once, and the addresses of its host.

A name is looked up in a thread of its own, one at a time: a lookup cannot be given up, and may outlast any deadline.
What was found is used for KEEP_S, and on while it is looked up anew.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

KEEP_S = 30.0
PORTS = {"http": 80, "https": 443}
_VISIBLE_ASCII = re.compile(r"[!-~]+")


class Endpoint(NamedTuple):
    """`headers`: what each request to it has, as lines. `path`: before that of any route. `tls`: None = plain HTTP."""

    url: str
    host: str
    port: int
    path: str
    headers: bytes
    tls: ssl.SSLContext | None


def read_endpoints(
    urls: str | Sequence[str], api_key: str | None, ca_file: str | Path | None, *, any_name: bool
) -> list[Endpoint]:
    """Raises ValueError and TypeError, and OSError for a file of certificates that cannot be read."""
    listed = [urls] if isinstance(urls, str) else list(urls)
    if not listed:
        raise ValueError("at least one URL is needed")
    if len(set(listed)) < len(listed):
        raise ValueError("each URL may be given once")
    if api_key is not None and not _VISIBLE_ASCII.fullmatch(api_key):
        raise ValueError("an API key is visible ASCII")
    tls = None
    if ca_file is not None or any(url.startswith("https:") for url in listed):
        tls = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # so that the file may hold the service's own certificate
        tls.check_hostname = not any_name
    return [_read(url, api_key, tls) for url in listed]


def _read(url: str, api_key: str | None, tls: ssl.SSLContext | None) -> Endpoint:
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address of a service, like http://10.0.0.5:8090")
    if parts.username is not None:
        raise ValueError("the address of a service has no user and no password")
    if not _VISIBLE_ASCII.fullmatch(url):
        raise ValueError(f"{url!r} has characters that no URL has")
    headers = f"host: {parts.netloc}\r\n"
    if api_key is not None:
        headers += f"authorization: Bearer {api_key}\r\n"
    is_tls = parts.scheme == "https"
    port = parts.port or PORTS[parts.scheme]
    path = parts.path.rstrip("/")
    return Endpoint(url.rstrip("/"), parts.hostname, port, path, headers.encode(), tls if is_tls else None)


class Addresses:
    """Those of one host, in the order in which they are tried. Safe among threads."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._found: Future[list[str]] | None = None
        self._running: Future[list[str]] | None = None
        self._fresh_until = 0.0
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return
        self._found, self._fresh_until = Future(), float("inf")
        self._found.set_result([host])

    def find(self) -> Future[list[str]]:
        """Never empty; ends with an OSError if the name is not known. Cancelling it does nothing."""
        with self._lock:
            if self._found is not None and time.monotonic() < self._fresh_until:
                return self._found
            if self._running is None:
                self._running = Future()
                self._running.set_running_or_notify_cancel()
                threading.Thread(
                    target=self._look_up, args=(self._running,), name=f"look up {self._host}", daemon=True
                ).start()
            return self._found or self._running

    def pass_over(self, address: str) -> None:
        """It did not accept in time: the others are tried first from now on, until the name is looked up anew."""
        with self._lock:
            found = self._found.result() if self._found is not None else []
            if address in found:
                found.remove(address)
                found.append(address)

    def _look_up(self, future: Future[list[str]]) -> None:
        try:
            found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        except (OSError, UnicodeError) as error:
            with self._lock:
                self._running = None
            future.set_exception(OSError(f"{self._host} cannot be looked up: {error}"))
            return
        with self._lock:
            self._found, self._running = future, None
            self._fresh_until = time.monotonic() + KEEP_S
        future.set_result(addresses)
