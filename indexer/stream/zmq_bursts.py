"""Whole messages out of ZMQ sockets, many at once.

What pyzmq does for each frame (a call, checks, an object, the question whether more follow, an exception when nothing
does) costs several times as much as libzmq itself. So a kernel receives a burst into one buffer, and its frames are cut
out of that. Where libzmq cannot be called directly, and where kernels run as plain Python, pyzmq receives message by
message, with the same result.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import structlog
import zmq

from indexer.compiled import IS_COMPILED
from indexer.stream.zmq_kernels import (
    CAN_CALL_LIBZMQ,
    ENOUGH,
    FRAMES_MAX,
    MESSAGE_T_BYTES,
    TOO_LARGE,
    close_frame,
    look_at_frame,
    receive_burst,
)

BUFFER_BYTES = 256 * 1024  # a frame that has no room in it is copied by itself
BURST_MESSAGES = 256  # of one call of the kernel

log = structlog.get_logger(__name__)

Receive: TypeAlias = Callable[["zmq.Socket[bytes]", int], list[list[bytes]]]
"""Up to so many of the messages that have come to a socket, as frames, in order; fewer = that was all. Waits for
nothing. Of a message of more than `FRAMES_MAX` frames only the first may be there. Raises ZMQError.
"""


def fastest_receive() -> Receive:
    """For all sockets of one thread."""
    if CAN_CALL_LIBZMQ:
        return BurstReceiver().receive
    if IS_COMPILED:
        log.warning("libzmq_not_found", pyzmq=zmq.__version__, effect="messages are received one by one")
    return receive_each


def compile_kernels() -> None:
    """Receives a frame that has no room in the buffer."""
    if not CAN_CALL_LIBZMQ:
        return
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as socket:
        sender.bind("inproc://rehearsal")
        socket.connect("inproc://rehearsal")
        sender.send(bytes(BUFFER_BYTES + 1))
        BurstReceiver().receive(socket, 2)


def receive_each(socket: zmq.Socket[bytes], messages_max: int) -> list[list[bytes]]:
    """`Receive` by pyzmq."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < messages_max:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass  # that was all
    return messages


class BurstReceiver:
    """`Receive` by libzmq. Nothing of a socket is kept from call to call: that of a closed one is an error, as ever."""

    def __init__(self) -> None:
        self._buffer = np.zeros(BUFFER_BYTES, np.uint8)
        self._view = self._buffer.data
        self._ends = np.zeros(BURST_MESSAGES * FRAMES_MAX, np.int64)
        self._counts = np.zeros(BURST_MESSAGES, np.int64)
        self._message_memory = np.zeros(MESSAGE_T_BYTES // 8, np.uint64)  # aligned, as libzmq wants it
        self._message_t = self._message_memory.ctypes.data

    def receive(self, socket: zmq.Socket[bytes], messages_max: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        begun: list[bytes] = []
        status = ENOUGH
        while status != errno.EAGAIN and len(messages) < messages_max:
            wanted = min(messages_max - len(messages), BURST_MESSAGES)
            status, whole, count = receive_burst(
                socket.underlying, self._message_t, wanted, len(begun), self._buffer, self._ends, self._counts
            )
            if whole or count:
                begun = self._cut(begun, whole, count, messages)
            if status == TOO_LARGE:
                begun = self._add_large(begun, messages)
            elif status not in (ENOUGH, errno.EAGAIN):
                raise zmq.ZMQError(status)
        return messages

    def _cut(self, begun: list[bytes], whole: int, count: int, messages: list[list[bytes]]) -> list[bytes]:
        """Adds whole messages, the first of which had `begun`. Returns the frames of the one that has begun now."""
        view, ends = self._view, self._ends[:count].tolist()
        frames = begun + [view[start:end].tobytes() for start, end in pairwise([0, *ends])]
        first = 0
        for frame_count in self._counts[:whole].tolist():
            messages.append(frames[first : first + frame_count])
            first += frame_count
        return frames[first:]

    def _add_large(self, begun: list[bytes], messages: list[list[bytes]]) -> list[bytes]:
        """As `_cut`, of the frame that had no room."""
        try:
            address, size, goes_on = look_at_frame(self._message_t)
            begun.append(ctypes.string_at(address, size))
        finally:
            close_frame(self._message_t)
        if goes_on:
            return begun
        messages.append(begun)
        return []
