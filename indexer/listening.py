"""Addresses to listen on: one's own, or one that several processes share."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from indexer.errors import ListenError


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket bound to the address, which does not listen yet. Raises ListenError.

    `is_shared`: other processes of the same account may bind it, too; connections are spread over those that listen.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ListenError(f"the address {host!r} is not known: {error.strerror}; choose another --host") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ListenError(_reason(error, host, port)) from error
    return bound


def listen(host: str, port: int, backlog: int, *, is_shared: bool = False) -> socket.socket:
    """As `bind`, and listens."""
    listener = bind(host, port, is_shared=is_shared)
    try:
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ListenError(_reason(error, host, port)) from error
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this machine only. An address that is not known is no risk."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return True
    return ip_address(address).is_loopback


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use; stop what uses it or choose another --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"the address {host} does not belong to this machine; choose another --host"
    return f"cannot listen on {host} port {port}: {error.strerror}"
