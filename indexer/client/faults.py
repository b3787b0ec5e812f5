"""What the connections of both clients share: how an attempt may fail, and which connection may be used again.

None of these errors ever leaves a client.
"""

from __future__ import annotations

import os
import select
import ssl

from indexer.client.answers import Reason


class Fault(Exception):
    """An attempt failed; `reason` is what is answered if no other endpoint does better."""

    reason = Reason.UNREACHABLE


class TooLate(Fault):
    """Not answered before the attempt's deadline."""

    reason = Reason.DEADLINE


class Garbled(Fault):
    """What came is no answer."""

    reason = Reason.MALFORMED


class Stale(Fault):
    """A connection that was kept is closed, as was found by using it: nothing came in answer."""


class NoPlace(Exception):
    """All connections that there may be were busy until the deadline: no fault of the endpoint."""


BUSY = "all connections were busy"
NOT_IN_TIME = "no answer in time"
CLOSED = "the connection was closed before the answer was complete"


def text_of(error: OSError) -> str:
    """What went wrong, in the same words from blocking sockets and from event loops."""
    if isinstance(error, ssl.SSLError) or error.errno is None or error.errno < 0:
        return str(error)
    return os.strerror(error.errno)


def is_quiet(descriptor: int) -> bool:
    """A connection that is neither closed by the other side, nor has anything to read that nobody asked for."""
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return not watch.poll(0)
