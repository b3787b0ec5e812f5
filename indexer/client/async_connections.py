"""Connections of the asynchronous client to one endpoint, in one event loop: kept, reused, bounded.

Invariants: as in `blocking_connections.py`. A call that is cancelled closes its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from indexer.client.addresses import Addresses, Endpoint
from indexer.client.faults import BUSY, CLOSED, NOT_IN_TIME, Fault, Garbled, NoPlace, Stale, TooLate, is_quiet, text_of
from indexer.client.http1 import MalformedAnswer, Response, ResponseReader

LATE_LOOK_S = 0.001


class AsyncConnections:
    """At most `connections_max` at once, the one used last is used next."""

    def __init__(self, endpoint: Endpoint, connections_max: int) -> None:
        self._endpoint = endpoint
        self._addresses = Addresses(endpoint.host)
        self._is_closed = False
        self._free: deque[_Connection] = deque()
        self._places = asyncio.Semaphore(connections_max)

    async def exchange(self, request: bytes, deadline: float) -> Response:
        """One request and its answer. Raises Fault, and NoPlace."""
        if self._places.locked():
            await self._wait_for_place(deadline)
        else:
            await self._places.acquire()
        try:
            kept = self._take()
            if kept is not None:
                try:
                    return await self._exchange_on(kept, request, deadline)
                except Stale:
                    pass  # the other side closed it meanwhile, as it may
            return await self._exchange_on(await self._connect(deadline), request, deadline)
        finally:
            self._places.release()

    def close(self) -> None:
        """Those in use are closed after their answer."""
        self._is_closed = True
        while self._free:
            self._free.pop().abort()

    async def _wait_for_place(self, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._places.acquire()
        except TimeoutError:
            raise NoPlace(BUSY) from None

    def _take(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_reusable():
                return connection
            connection.abort()
        return None

    async def _exchange_on(self, connection: _Connection, request: bytes, deadline: float) -> Response:
        can_reuse = False
        try:
            response = await connection.exchange(request, deadline)
            can_reuse = response.can_reuse and not self._is_closed
            return response
        finally:
            if can_reuse:
                self._free.append(connection)
            else:
                connection.abort()

    async def _connect(self, deadline: float) -> _Connection:
        """To the first of the host's addresses that accepts."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                addresses = await asyncio.wrap_future(self._addresses.find())
                for place, address in enumerate(tuple(addresses)):
                    try:
                        return await self._connect_to(address)
                    except asyncio.CancelledError:  # by the deadline, or by the caller
                        self._addresses.pass_over(address)
                        raise
                    except OSError:
                        if place == len(addresses) - 1:
                            raise
        except TimeoutError:
            raise TooLate("no connection in time") from None
        except OSError as error:
            raise Fault(text_of(error)) from error
        raise AssertionError("a host has at least one address")

    async def _connect_to(self, address: str) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = self._endpoint.tls
        _, connection = await loop.create_connection(
            lambda: _Connection(loop),
            address,
            self._endpoint.port,
            ssl=tls,
            server_hostname=None if tls is None else self._endpoint.host,
        )
        return connection


class _Connection(asyncio.Protocol):
    """One exchange at a time. What comes while nobody asks ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_open = True
        self._loop = loop
        self._reader = ResponseReader()
        self._answer: asyncio.Future[Response] | None = None

    async def exchange(self, request: bytes, deadline: float) -> Response:
        """Raises Fault."""
        self._reader = ResponseReader()
        self._answer = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)
        try:
            self._transport.write(request)
            return await self._answer
        finally:
            timer.cancel()
            self._answer = None

    def is_reusable(self) -> bool:
        """The loop may not have looked yet at what came."""
        return self._is_open and is_quiet(self._transport.get_extra_info("socket").fileno())

    def abort(self) -> None:
        self._is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()
            return
        try:
            if self._reader.feed(data):
                assert self._reader.response is not None
                self._answer.set_result(self._reader.response)
        except MalformedAnswer as error:
            self._fail(self._answer, Garbled(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = False
        text = text_of(exc) if isinstance(exc, OSError) else CLOSED
        self._fail(self._answer, Fault(text) if self._reader.has_begun else Stale(text))

    def _expire(self) -> None:
        """A loop that was held up looks at its timers first: what has come meanwhile is still read."""
        if self._answer is not None and not is_quiet(self._transport.get_extra_info("socket").fileno()):
            self._loop.call_later(LATE_LOOK_S, self._fail, self._answer, TooLate(NOT_IN_TIME))
        else:
            self._fail(self._answer, TooLate(NOT_IN_TIME))

    def _fail(self, answer: asyncio.Future[Response] | None, fault: Fault) -> None:
        if answer is not None and not answer.done():
            answer.set_exception(fault)
