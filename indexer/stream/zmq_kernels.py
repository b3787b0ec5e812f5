"""Receiving a burst of ZMQ messages by one call, through libzmq's own functions.

They are those of the library that pyzmq has loaded, found through its extension module. Compiled code is kept on disk,
so it knows them by names, and each process says where they are. What is in a `zmq_msg_t` only libzmq knows.
"""

from __future__ import annotations

import ctypes
import errno
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import zmq
from llvmlite import binding

from indexer.compiled import IS_COMPILED, kernel_over

FRAMES_MAX = 8
"""Frames kept of one message: more than any that is not refused has, and as many as are shown of one that is."""
MESSAGE_T_BYTES = 64  # by zmq.h

ENOUGH, TOO_LARGE = 0, -1
"""How a burst ended, if not by an errno: as many messages as were wanted, or a frame that has no room in the buffer."""

_INT, _ADDRESS, _BYTES = numba.intc, numba.uintp, numba.uintp
_FUNCTIONS = {
    "zmq_errno": _INT(),
    "zmq_msg_init": _INT(_ADDRESS),
    "zmq_msg_recv": _INT(_ADDRESS, _ADDRESS, _INT),
    "zmq_msg_size": _BYTES(_ADDRESS),
    "zmq_msg_data": _ADDRESS(_ADDRESS),
    "zmq_msg_more": _INT(_ADDRESS),
    "zmq_msg_close": _INT(_ADDRESS),
    "memmove": _ADDRESS(_ADDRESS, _ADDRESS, _BYTES),
}
_DONTWAIT = np.intc(zmq.DONTWAIT)


def find_functions() -> dict[str, int]:
    """The addresses of these functions in this process; none if pyzmq's extension module does not lead to them all."""
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.CDLL(_zmq.__file__)
        return {name: ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in _FUNCTIONS}
    except (ImportError, OSError, AttributeError):
        return {}


def _symbol(name: str) -> str:
    return f"kv_indexer_{name}"  # the plain names may be known already, of another libzmq


_found = find_functions() if IS_COMPILED else {}
for _name, _function in _found.items():
    binding.add_symbol(_symbol(_name), _function)

CAN_CALL_LIBZMQ = bool(_found)

_call: dict[str, Any] = {
    name: numba.types.ExternalFunction(_symbol(name), signature) for name, signature in _FUNCTIONS.items()
}
_errno, _memmove = _call["zmq_errno"], _call["memmove"]
_init, _recv, _close = _call["zmq_msg_init"], _call["zmq_msg_recv"], _call["zmq_msg_close"]
_size, _data, _more = _call["zmq_msg_size"], _call["zmq_msg_data"], _call["zmq_msg_more"]


@kernel_over()
def receive_burst(
    socket: int,
    message_t: int,
    messages_max: int,
    begun: int,
    buffer: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Up to `messages_max` of the messages that have come, without waiting: how that ended (a positive number is an
    errno; EAGAIN = that was all), how many messages, how many frames.

    `socket`, `message_t`: addresses, the second of memory for one frame; `close_frame` is due after `TOO_LARGE`.
    `begun`: frames of the first message that are kept already, if the last call ended in the middle of it.
    `buffer`: gets the bytes of the frames, one after another; `ends`: where each ends, `FRAMES_MAX` for each message;
    `counts`: frames of each whole message, with those that had begun it.
    """
    message = np.uintp(message_t)
    address = buffer.ctypes.data
    status = ENOUGH
    messages = frames = 0
    used = np.int64(0)
    kept = begun
    _init(message)
    while messages < messages_max:
        if _recv(message, np.uintp(socket), _DONTWAIT) < 0:
            error = _errno()
            if error == errno.EINTR:
                continue
            status = error
            break
        if kept < FRAMES_MAX:
            size = np.int64(_size(message))
            if size > len(buffer) - used:
                status = TOO_LARGE
                break
            _memmove(np.uintp(address + used), _data(message), np.uintp(size))
            used += size
            ends[frames] = used
            frames += 1
            kept += 1
        if not _more(message):
            counts[messages] = kept
            messages += 1
            kept = 0
    if status != TOO_LARGE:
        _close(message)
    return status, messages, frames


@kernel_over()
def look_at_frame(message_t: int) -> tuple[int, int, bool]:
    """Of a frame that has no room: the address of its bytes, how many they are, and whether the message goes on."""
    message = np.uintp(message_t)
    return _data(message), _size(message), _more(message) != 0


@kernel_over()
def close_frame(message_t: int) -> None:
    """Gives the frame's memory back."""
    _close(np.uintp(message_t))
