"""ZMQ endpoints that a subscriber can connect to: checked and brought into one spelling.

Engines are configured with what they *bind*, often a wildcard; registering that is the most common mistake, and ZMQ
would redial it silently for ever. So every fault is refused here, with a sentence that names it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

from indexer.errors import EndpointError

PORT_MAX: Final = 65_535
ENDPOINT_CHARACTERS_MAX: Final = 1_024
IPC_PATH_BYTES_MAX: Final = 107  # sun_path of a Unix socket, without its final zero byte

_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")
_ZONE = re.compile(r"[A-Za-z0-9._~-]{1,64}")
_WILDCARD_ADVICE = "is what an engine binds, not what can be connected to: give the engine's own address"


def normalise_endpoint(endpoint: str) -> str:
    """The endpoint in its one spelling: lower-case scheme and host, IPv6 addresses compressed and in brackets.

    Normalising twice changes nothing. Raises EndpointError.
    """
    if len(endpoint) > ENDPOINT_CHARACTERS_MAX:
        raise EndpointError(f"the endpoint has more than {ENDPOINT_CHARACTERS_MAX} characters")
    if not endpoint.isprintable() or " " in endpoint:
        raise EndpointError(f"endpoint {endpoint!r} contains spaces or control characters")
    scheme, separator, rest = endpoint.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise EndpointError(f"endpoint {endpoint!r} has no scheme; it must look like tcp://host:port")
    if scheme == "tcp":
        return _normalise_tcp(endpoint, rest)
    if scheme == "ipc":
        return _normalise_ipc(endpoint, rest)
    raise EndpointError(f"endpoint {endpoint!r} has the scheme {scheme!r}; only tcp and ipc are supported")


def host_of(endpoint: str) -> str:
    """The host of a normalised tcp endpoint, with its brackets if it is an IPv6 address; "" for other schemes."""
    scheme, _, rest = endpoint.partition("://")
    return rest.rpartition(":")[0] if scheme == "tcp" else ""


def is_host_name(endpoint: str) -> bool:
    """Whether a normalised endpoint names a host that must be looked up first."""
    host = host_of(endpoint)
    return bool(host) and not host.startswith("[") and not _is_numeric(host)


def _normalise_tcp(endpoint: str, rest: str) -> str:
    host, separator, port = rest.rpartition(":")
    if not separator or "]" in port:
        raise EndpointError(f"endpoint {endpoint!r} has no port; it must look like tcp://host:port")
    return f"tcp://{_normalise_host(endpoint, host)}:{_port(endpoint, port)}"


def _port(endpoint: str, text: str) -> int:
    if text == "*":
        raise EndpointError(f"endpoint {endpoint!r} has a wildcard port; a subscriber must know the engine's port")
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise EndpointError(f"endpoint {endpoint!r} must end with a port number, not {text!r}")
    port = int(text)
    if not 1 <= port <= PORT_MAX:
        raise EndpointError(f"endpoint {endpoint!r} has port {port}; ports are 1 to {PORT_MAX}")
    return port


def _normalise_host(endpoint: str, host: str) -> str:
    if not host or host == "[]":
        raise EndpointError(f"endpoint {endpoint!r} has no host")
    if host == "*":
        raise EndpointError(f"endpoint {endpoint!r}: the wildcard '*' {_WILDCARD_ADVICE}")
    if host.startswith("[") or host.endswith("]"):
        if not (host.startswith("[") and host.endswith("]")):
            raise EndpointError(f"endpoint {endpoint!r} has an unbalanced bracket around its host")
        return _ipv6(endpoint, host[1:-1])
    if ":" in host:
        return _ipv6(endpoint, host)
    return _ipv4_or_name(endpoint, host)


def _ipv6(endpoint: str, text: str) -> str:
    address_text, has_zone, zone = text.partition("%")
    try:
        address = ipaddress.IPv6Address(address_text)
    except ValueError as error:
        raise EndpointError(
            f"endpoint {endpoint!r}: {address_text!r} is not an IPv6 address; write tcp://[address]:port"
        ) from error
    if address.is_unspecified or (address.ipv4_mapped is not None and address.ipv4_mapped.is_unspecified):
        raise EndpointError(f"endpoint {endpoint!r}: the wildcard address {address} {_WILDCARD_ADVICE}")
    if has_zone and not _ZONE.fullmatch(zone):
        raise EndpointError(f"endpoint {endpoint!r} has the bad zone id {zone!r}; it names a network interface")
    spelled = socket.inet_ntop(socket.AF_INET6, address.packed)  # the same on every Python; `str` changed in 3.13
    return f"[{spelled}%{zone}]" if has_zone else f"[{spelled}]"


def _ipv4_or_name(endpoint: str, host: str) -> str:
    name = host.lower()
    if _is_numeric(name):
        try:
            address = ipaddress.IPv4Address(name)
        except ValueError as error:
            raise EndpointError(f"endpoint {endpoint!r}: {host!r} is not an IPv4 address") from error
        if address.is_unspecified:
            raise EndpointError(f"endpoint {endpoint!r}: the wildcard address {address} {_WILDCARD_ADVICE}")
        return str(address)
    if len(name) > 253 or not _HOST_NAME.fullmatch(name):
        raise EndpointError(f"endpoint {endpoint!r}: {host!r} is not a host name")
    return name


def _is_numeric(host: str) -> bool:
    """Whether a host consists of digits and dots only: an IPv4 address, well formed or not."""
    return not host.strip("0123456789.")


def _normalise_ipc(endpoint: str, path: str) -> str:
    if not path or path == "@":
        raise EndpointError(f"endpoint {endpoint!r} has no path")
    if path == "*":
        raise EndpointError(f"endpoint {endpoint!r}: the wildcard '*' {_WILDCARD_ADVICE}")
    if len(path.encode()) > IPC_PATH_BYTES_MAX:
        raise EndpointError(f"endpoint {endpoint!r} has a path of more than {IPC_PATH_BYTES_MAX} bytes")
    return f"ipc://{path}"
