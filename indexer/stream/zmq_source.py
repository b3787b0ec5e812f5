"""ZMQ sockets behind the ports of `ports.py`: opened, watched and closed here, and nowhere else.

Sockets are read without waiting, in bursts (`zmq_bursts.py`). When one is empty, its file descriptor is watched once:
ZMQ's descriptor says "look again", not "a message is there", so watching it while messages are left would spin. A
socket monitor tells of connections made and lost; its own descriptor stays watched.

Host names are looked up by libzmq, which uses only the first address of one family. So a name is tried as IPv4 first,
and after a few failed tries as the other family; what worked is remembered for the name.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from indexer.stream.endpoints import host_of, is_host_name
from indexer.stream.limits import StreamLimits
from indexer.stream.zmq_bursts import fastest_receive
from indexer.wire.frames import replay_request

TRIES_PER_FAMILY = 3
RECONNECT_INTERVAL_MS = 100
RECONNECT_INTERVAL_MAX_MS = 2_000
TCP_KEEPALIVE_IDLE_S = 30
TCP_KEEPALIVE_INTERVAL_S = 10
TCP_KEEPALIVE_TRIES = 3
MONITOR_BURST = 64
SOCKETS_PER_PUBLISHER = 4  # subscription, two ends of its monitor, a replay

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


def raise_open_files_limit() -> int:
    """Allow this process as many open files as it may have (about five per publisher). Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class ZmqTransport:
    """Opens subscriptions and replay connections of one ZMQ context."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self.families: dict[str, bool] = {}  # host name -> whether IPv6 worked
        self.receive = fastest_receive()
        self._context = zmq.Context()
        wanted = SOCKETS_PER_PUBLISHER * limits.publishers_max + 64
        self._context.set(zmq.MAX_SOCKETS, min(wanted, self._context.get(zmq.SOCKET_LIMIT)))

    def open_live(self, endpoint: str, wake: Callable[[], None]) -> ZmqLiveSource:
        return ZmqLiveSource(self, endpoint, wake)

    def open_replay(self, endpoint: str, wake: Callable[[], None]) -> ZmqReplaySource:
        return ZmqReplaySource(self, endpoint, wake)

    def close(self) -> None:
        """Ends the context. All sources must have been closed; what they have not sent is dropped."""
        self._context.destroy(linger=0)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, self.limits.receive_queue_max)
        socket.set(zmq.MAXMSGSIZE, self.limits.message_bytes_max)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_INTERVAL_MAX_MS)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, TCP_KEEPALIVE_IDLE_S)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, TCP_KEEPALIVE_INTERVAL_S)
        socket.set(zmq.TCP_KEEPALIVE_CNT, TCP_KEEPALIVE_TRIES)
        return socket

    def uses_ipv6(self, endpoint: str) -> bool:
        """Whether to look up the endpoint's host as IPv6; true for all but names not known to need it."""
        return not is_host_name(endpoint) or self.families.get(host_of(endpoint), False)


class _Inbox:
    """Reads one socket in bursts, and wakes its owner when there may be more."""

    def __init__(self, transport: ZmqTransport, socket: zmq.Socket[bytes], wake: Callable[[], None]) -> None:
        self._receive = transport.receive
        self._socket = socket
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._is_watched = False

    def drain(self, messages_max: int) -> list[list[bytes]]:
        messages = self._receive(self._socket, messages_max)
        if len(messages) < messages_max:
            self._watch()
        return messages

    def close(self) -> None:
        if self._is_watched:
            self._loop.remove_reader(self._descriptor)
            self._is_watched = False

    def _watch(self) -> None:
        if not self._is_watched:
            self._loop.add_reader(self._descriptor, self._on_readable)
            self._is_watched = True

    def _on_readable(self) -> None:
        self.close()
        self._wake()


class ZmqLiveSource:
    """A subscription to everything that one publisher sends."""

    def __init__(self, transport: ZmqTransport, endpoint: str, wake: Callable[[], None]) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._wake = wake
        self._changes: list[bool] = []
        self._is_connected = self._has_connected = False
        self._failed_tries = 0
        self._socket = transport.socket(zmq.SUB)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        self._monitor.set(zmq.LINGER, 0)
        self._inbox = _Inbox(transport, self._socket, wake)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._monitor.get(zmq.FD)), self._on_monitor)
        self._socket.set(zmq.SUBSCRIBE, b"")
        try:
            self._connect()
        except zmq.ZMQError:
            self.close()
            raise

    def drain(self, messages_max: int) -> list[list[bytes]]:
        return self._inbox.drain(messages_max)

    def connection_changes(self) -> list[bool]:
        self._read_monitor()
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        self._inbox.close()
        self._loop.remove_reader(int(self._monitor.get(zmq.FD)))
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _connect(self) -> None:
        self._is_ipv6 = self._transport.uses_ipv6(self._endpoint)
        self._socket.set(zmq.IPV6, int(self._is_ipv6))
        self._socket.connect(self._endpoint)

    def _on_monitor(self) -> None:
        self._read_monitor()
        if self._changes:
            self._wake()

    def _read_monitor(self) -> None:
        is_all = False
        while not is_all:
            messages = self._transport.receive(self._monitor, MONITOR_BURST)
            is_all = len(messages) < MONITOR_BURST
            for message in messages:
                self._note_event(parse_monitor_message(message)["event"])

    def _note_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._note_connected()
        elif event == zmq.EVENT_DISCONNECTED and self._is_connected:
            self._is_connected = False
            self._changes.append(False)
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._note_failed_try()

    def _note_connected(self) -> None:
        self._failed_tries = 0
        self._is_connected = self._has_connected = True
        self._changes.append(True)
        if is_host_name(self._endpoint):
            self._transport.families[host_of(self._endpoint)] = self._is_ipv6

    def _note_failed_try(self) -> None:
        self._failed_tries += 1
        if is_host_name(self._endpoint) and not self._has_connected and self._failed_tries >= TRIES_PER_FAMILY:
            self._failed_tries = 0
            self._transport.families[host_of(self._endpoint)] = not self._is_ipv6
            self._socket.disconnect(self._endpoint)
            self._connect()
            self._wake()  # connecting may have used up the socket's sign that messages are there


class ZmqReplaySource:
    """A DEALER for one request: a REQ socket could read only the first answer."""

    def __init__(self, transport: ZmqTransport, endpoint: str, wake: Callable[[], None]) -> None:
        self._socket = transport.socket(zmq.DEALER)
        self._inbox = _Inbox(transport, self._socket, wake)
        self._socket.set(zmq.IPV6, int(transport.uses_ipv6(endpoint)))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def request(self, start: int) -> None:
        self._socket.send_multipart(replay_request(start), zmq.NOBLOCK)

    def drain(self, messages_max: int) -> list[list[bytes]]:
        return self._inbox.drain(messages_max)

    def close(self) -> None:
        self._inbox.close()
        self._socket.close(0)
