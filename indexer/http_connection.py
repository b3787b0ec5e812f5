"""One HTTP connection: plain queries are answered here, everything else by uvicorn and the application.

A plain query is answered at once, with no parser, no task and no ASGI, which are most of the cost of a short one. Its
bytes are kept until all have come. When they do not come soon, or what came is not the plain case, the parser gets them
as if nothing had been kept.

Invariants: bytes are kept only while every request before them has been answered; at most one query is answered for
what came at once (pipelined ones take turns with other connections); only KEPT_MAX connections keep bytes, and none
for longer than KEEP_S.

If broken: answers would leave in another order than their requests came.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from indexer.api.access import ANYONE, Caller, LastCaller
from indexer.api.errors import error_response
from indexer.api.known_queries import REQUEST_BYTES_MAX, as_input
from indexer.api.query_route import DirectQueries, PlainQuery

HEAD_BYTES_MAX = 65_536
KEPT_MAX = 64
KEEP_S = 1.0


class Input:
    """Bytes that came and have not been used up."""

    def __init__(self) -> None:
        self.filled = 0
        memory = bytearray(REQUEST_BYTES_MAX)
        self.data, self.array = memoryview(memory), as_input(memory)  # the same bytes


class Inputs:
    """The input that all connections read into, one at a time, and those that one connection keeps for itself."""

    def __init__(self) -> None:
        self.shared = Input()
        self._free: list[Input] = []
        self._kept = 0

    def keep(self) -> Input | None:
        """What was just read is the caller's from here on; None = too many are kept."""
        if self._kept >= KEPT_MAX:
            return None
        self._kept += 1
        kept, self.shared = self.shared, self._free.pop() if self._free else Input()
        return kept

    def give_back(self, kept: Input) -> None:
        self._kept -= 1
        kept.filled = 0
        self._free.append(kept)


class ConnectionConfig(uvicorn.Config):
    """What every connection needs to know: uvicorn gives each its configuration."""

    queries: DirectQueries | None = None
    inputs: Inputs
    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.ssl = self.tls


class Connection(asyncio.BufferedProtocol):
    """What uvicorn makes for every connection. The transport reads into what `get_buffer` returns, and then calls
    `buffer_updated`, with nothing in between."""

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._is_tls = config.tls is not None
        self._queries = config.queries
        self._inputs = config.inputs
        self._state = server_state
        self._parser = Parser(config, server_state, app_state)
        self._loop = _loop or asyncio.get_running_loop()
        self._kept: Input | None = None
        self._query: PlainQuery | None = None  # that the kept bytes are the beginning of
        self._last_caller = LastCaller()
        self._keep_timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None  # since a query was answered here; uvicorn times its own answers
        self._idle_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ its life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser.connection_made(transport)
        self._state.connections.discard(self._parser)
        self._state.connections.add(cast("Any", self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast("Any", self))
        self._drop_kept()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._parser.connection_lost(exc)

    def eof_received(self) -> None:
        self._parser.eof_received()

    def pause_writing(self) -> None:
        self._parser.pause_writing()

    def resume_writing(self) -> None:
        self._parser.resume_writing()

    def shutdown(self) -> None:
        """What is half received is still answered."""
        if self._kept is not None:
            self._parse(self._kept)
        self._parser.shutdown()
        transport = self._transport
        if self._is_tls and transport.is_closing() and not transport.get_write_buffer_size():
            transport.abort()  # else it waits for the goodbye of a client that may be asleep

    # ------------------------------------------------------------------ what comes

    def get_buffer(self, sizehint: int) -> memoryview:
        kept = self._kept
        return self._inputs.shared.data if kept is None else kept.data[kept.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._idle_since = None
        came = self._kept or self._inputs.shared
        came.filled += nbytes
        caller = self._find_caller(came)
        if caller is None:
            self._parse(came)
        elif (self._query is None or came.filled == self._query.stop) and self._answer_known(came, caller):
            pass
        else:
            self._find_query(came, caller)

    def _find_caller(self, came: Input) -> Caller | None:
        """None: this is not to be answered here."""
        if self._query is not None:
            return self._query.caller
        if self._queries is None or not self._parser.is_between_requests():
            return None
        if self._queries.keyring is None:
            return ANYONE
        return self._queries.find_caller(came.data, came.filled, self._last_caller)

    def _find_query(self, came: Input, caller: Caller) -> None:
        assert self._queries is not None
        if self._query is None:
            self._query = self._queries.find(came.data, came.filled, caller)
        if self._query is None:
            self._parse(came)
        elif came.filled >= self._query.stop:
            self._answer(self._query, came)
        elif self._kept is None:
            self._keep()

    def _parse(self, came: Input) -> None:
        """The parser takes what came."""
        data = bytes(came.data[: came.filled])
        self._use_up(came)
        self._parser.data_received(data)

    def _keep(self) -> None:
        self._parser.keep_alive()
        self._kept = self._inputs.keep()
        if self._kept is None:
            self._parse(self._inputs.shared)
        else:
            self._keep_timer = self._loop.call_later(KEEP_S, self._parse, self._kept)

    def _answer_known(self, came: Input, caller: Caller) -> bool:
        """Whether it was the request of a query that one kernel answers."""
        assert self._queries is not None
        answer = self._queries.answer_known(came.array, came.filled, self._state.default_headers, caller)
        if answer is None:
            return False
        self._parser.keep_alive()
        self._use_up(came)
        self._transport.write(answer)
        self._state.total_requests += 1
        self._begin_idleness()
        return True

    def _answer(self, query: PlainQuery, came: Input) -> None:
        assert self._queries is not None
        self._parser.keep_alive()
        body, following = bytes(came.data[query.start : query.stop]), bytes(came.data[query.stop : came.filled])
        self._use_up(came)
        answer = self._queries.answer(query, body)
        headers = [*self._state.default_headers, *answer.headers]
        self._transport.write(encode_answer(answer.status, headers, answer.body))
        self._state.total_requests += 1
        if following:
            self._parser.data_received(following)
        else:
            self._begin_idleness()

    def _use_up(self, came: Input) -> None:
        came.filled = 0
        self._drop_kept()

    def _drop_kept(self) -> None:
        self._query = None
        if self._kept is not None:
            self._inputs.give_back(self._kept)
            self._kept = None
        if self._keep_timer is not None:
            self._keep_timer.cancel()
            self._keep_timer = None

    # ------------------------------------------------------------------ when nothing comes

    def _begin_idleness(self) -> None:
        """One timer watches many answers: setting one for each would be a tenth of a query's cost."""
        self._idle_since = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._parser.timeout_keep_alive, self._check_idleness)

    def _check_idleness(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return
        left_s = self._idle_since + self._parser.timeout_keep_alive - self._loop.time()
        if left_s <= 0:
            self._parser.timeout_keep_alive_handler()
        else:
            self._idle_timer = self._loop.call_later(left_s, self._check_idleness)


class Parser(HttpToolsProtocol):
    """uvicorn's own protocol; bounds the head of a request, and refuses in our envelope what is no HTTP.

    It keeps a head until it is complete, at many times its size, and joins the pieces of a long value anew with each
    that arrives: some megabytes would stop the event loop for seconds.
    """

    _head_bytes = 0
    _is_in_head = True
    _is_in_message = False

    def is_between_requests(self) -> bool:
        """Nothing is under way or waits to be written."""
        last: RequestResponseCycle | None = self.cycle
        return not self._is_in_message and (last is None or last.response_complete) and not self.flow.write_paused

    def keep_alive(self) -> None:
        """Something came that will not be parsed."""
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, "head_too_large", f"request line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        self._is_in_head, self._is_in_message, self._head_bytes = True, True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_message = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad_request", msg)

    def _refuse(self, status: int, code: str, message: str) -> None:
        response = error_response(status, code, message, headers={"connection": "close"})
        self.transport.write(encode_answer(status, response.raw_headers, bytes(response.body)))
        self.transport.close()


def encode_answer(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join((STATUS_LINE[status], *lines, b"\r\n", body))
