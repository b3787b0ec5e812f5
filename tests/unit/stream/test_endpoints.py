"""Endpoints: one spelling for what can be connected to, a sentence for what cannot."""

from __future__ import annotations

import pytest

from indexer.errors import EndpointError
from indexer.stream.endpoints import host_of, is_host_name, normalise_endpoint


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("TCP://Engine-1.Example.com:5557", "tcp://engine-1.example.com:5557"),
        ("tcp://engine_1.svc.cluster.local.:05557", "tcp://engine_1.svc.cluster.local.:5557"),
        ("tcp://localhost:1", "tcp://localhost:1"),
        ("tcp://localhost:65535", "tcp://localhost:65535"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("tcp://::1:5557", "tcp://[::1]:5557"),
        ("tcp://2a02:1::5:5557", "tcp://[2a02:1::5]:5557"),
        ("tcp://[2A02:0001:0:0:0:0:0:5]:5557", "tcp://[2a02:1::5]:5557"),
        ("tcp://[fd00::1%eth0]:5557", "tcp://[fd00::1%eth0]:5557"),
        ("tcp://fe80::1%eth0:5557", "tcp://[fe80::1%eth0]:5557"),
        ("tcp://[::ffff:10.0.0.1]:5557", "tcp://[::ffff:10.0.0.1]:5557"),
        ("ipc:///run/engine/kv-events", "ipc:///run/engine/kv-events"),
        ("IPC://@abstract", "ipc://@abstract"),
    ],
)
def test_endpoints_have_one_spelling(given: str, kept: str) -> None:
    assert normalise_endpoint(given) == kept
    assert normalise_endpoint(kept) == kept


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "no scheme"),
        ("10.0.0.1:5557", "no scheme"),
        ("http://h:5557", "scheme 'http'"),
        ("inproc://x", "scheme 'inproc'"),
        ("pgm://h:5557", "scheme 'pgm'"),
        ("://h:5557", "scheme ''"),
        ("tcp://", "no port"),
        ("tcp://host", "no port"),
        ("tcp://[::1]", "no port"),
        ("tcp://:5557", "no host"),
        ("tcp://[]:5557", "no host"),
        ("tcp://*:5557", "wildcard '*'"),
        ("tcp://0.0.0.0:5557", "wildcard address 0.0.0.0"),
        ("tcp://:::5557", "wildcard address ::"),
        ("tcp://[::]:5557", "wildcard address ::"),
        ("tcp://[0:0:0:0:0:0:0:0]:5557", "wildcard address ::"),
        ("tcp://[::ffff:0.0.0.0]:5557", "wildcard address"),
        ("tcp://0:5557", "not an IPv4 address"),
        ("tcp://h:*", "wildcard port"),
        ("tcp://h:0", "port 0"),
        ("tcp://h:65536", "port 65536"),
        ("tcp://h:99999999999", "must end with a port number"),
        ("tcp://h:-1", "must end with a port number"),
        ("tcp://h:", "must end with a port number"),
        ("tcp://h:5557/", "must end with a port number"),
        ("tcp://h:\u0665\u0665", "must end with a port number"),
        ("tcp://h:55x7", "must end with a port number"),
        ("tcp://256.1.1.1:5557", "not an IPv4 address"),
        ("tcp://1.2.3:5557", "not an IPv4 address"),
        ("tcp://[10.0.0.1]:5557", "not an IPv6 address"),
        ("tcp://[::1:5557", "unbalanced bracket"),
        ("tcp://::1]:5557", "unbalanced bracket"),
        ("tcp://2a02:1:2:3:4:5:6:7", "not an IPv6 address"),
        ("tcp://[fd00::1%]:5557", "bad zone id"),
        ("tcp://[fd00::1%a/b]:5557", "bad zone id"),
        ("tcp://user@host:5557", "not a host name"),
        ("tcp://eth0;host:5557", "not a host name"),
        ("tcp://-host:5557", "not a host name"),
        ("tcp://a..b:5557", "not a host name"),
        ("tcp://" + "a" * 64 + ":5557", "not a host name"),
        ("tcp://h ost:5557", "spaces or control characters"),
        ("tcp://host:5557\n", "spaces or control characters"),
        ("tcp://ho\0st:5557", "spaces or control characters"),
        ("ipc://", "no path"),
        ("ipc://*", "wildcard '*'"),
        ("ipc:///" + "x" * 107, "more than 107 bytes"),
        ("tcp://" + "a" * 2_000 + ":1", "more than 1024 characters"),
    ],
)
def test_what_cannot_be_connected_to_is_refused_with_the_reason(endpoint: str, says: str) -> None:
    with pytest.raises(EndpointError, match=r"endpoint") as caught:
        normalise_endpoint(endpoint)
    assert says in str(caught.value)


def test_host_names_are_told_from_addresses() -> None:
    assert is_host_name("tcp://localhost:1")
    assert host_of("tcp://localhost:1") == "localhost"
    for endpoint in ("tcp://10.0.0.1:1", "tcp://[::1]:1", "ipc:///a:b"):
        assert not is_host_name(endpoint)
