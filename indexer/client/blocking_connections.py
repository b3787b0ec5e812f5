"""Connections of the synchronous client to one endpoint: kept, reused, bounded. Safe among threads.

Invariants: a connection is used by one call at a time, and used again only after a whole answer and if nothing else has
come; no call outlasts its deadline, whatever the other side does. If broken: an answer to another question.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque

from indexer.client.addresses import Addresses, Endpoint
from indexer.client.faults import BUSY, CLOSED, NOT_IN_TIME, Fault, Garbled, NoPlace, Stale, TooLate, is_quiet, text_of
from indexer.client.http1 import MalformedAnswer, Response, ResponseReader

READ_BYTES = 262_144


class BlockingConnections:
    """At most `connections_max` at once, the one used last is used next."""

    def __init__(self, endpoint: Endpoint, connections_max: int) -> None:
        self._endpoint = endpoint
        self._connections_max = connections_max
        self._addresses = Addresses(endpoint.host)
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a fresh process does after a fork: what is open belongs to the parent."""
        self._is_closed = False
        self._free: deque[socket.socket] = deque()
        self._places = threading.BoundedSemaphore(self._connections_max)

    def exchange(self, request: bytes, deadline: float) -> Response:
        """One request and its answer. Raises Fault, and NoPlace."""
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NoPlace(BUSY)
        try:
            kept = self._take()
            if kept is not None:
                try:
                    return self._exchange_on(kept, request, deadline)
                except Stale:
                    pass  # the other side closed it meanwhile, as it may
            return self._exchange_on(self._connect(deadline), request, deadline)
        finally:
            self._places.release()

    def close(self) -> None:
        """Those in use are closed after their answer."""
        self._is_closed = True
        while (connection := self._pop()) is not None:
            connection.close()

    def _take(self) -> socket.socket | None:
        while (connection := self._pop()) is not None:
            if is_quiet(connection.fileno()):
                return connection
            connection.close()
        return None

    def _pop(self) -> socket.socket | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _exchange_on(self, connection: socket.socket, request: bytes, deadline: float) -> Response:
        reader = ResponseReader()
        can_reuse = False
        try:
            connection.settimeout(_left(deadline))
            connection.sendall(request)
            while True:
                connection.settimeout(_left(deadline))
                data = connection.recv(READ_BYTES)
                if not data:
                    raise Fault(CLOSED) if reader.has_begun else Stale(CLOSED)
                if reader.feed(data):
                    break
            response = reader.response
            assert response is not None
            can_reuse = response.can_reuse
            return response
        except TimeoutError:
            raise TooLate(NOT_IN_TIME) from None
        except MalformedAnswer as error:
            raise Garbled(str(error)) from error
        except OSError as error:
            raise (Fault if reader.has_begun else Stale)(text_of(error)) from error
        finally:
            if can_reuse:
                self._free.append(connection)
            else:
                connection.close()
            if self._is_closed:
                self.close()

    def _connect(self, deadline: float) -> socket.socket:
        """To the first of the host's addresses that accepts."""
        try:
            addresses = self._addresses.find().result(_left(deadline))
            for place, address in enumerate(tuple(addresses)):
                try:
                    return self._connect_to(address, deadline)
                except TimeoutError:
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

    def _connect_to(self, address: str, deadline: float) -> socket.socket:
        connection = socket.create_connection((address, self._endpoint.port), _left(deadline))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._endpoint.tls is None:
                return connection
            connection.settimeout(_left(deadline))
            return self._endpoint.tls.wrap_socket(connection, server_hostname=self._endpoint.host)
        except BaseException:
            connection.close()
            raise


def _left(deadline: float) -> float:
    """Seconds, above 0. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
