"""Receiving bursts from real sockets, by libzmq and by pyzmq: both give what was sent."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from indexer.compiled import IS_COMPILED
from indexer.stream.limits import StreamLimits
from indexer.stream.zmq_bursts import BUFFER_BYTES, BURST_MESSAGES, BurstReceiver, Receive, receive_each
from indexer.stream.zmq_kernels import CAN_CALL_LIBZMQ, FRAMES_MAX
from indexer.stream.zmq_source import ZmqTransport
from indexer.wire.errors import WireError
from indexer.wire.frames import split_message, split_replay
from tests.sizes import examples

ROOT = Path(__file__).parents[3]
WAYS = [pytest.param(receive_each, id="pyzmq")]
if CAN_CALL_LIBZMQ:
    WAYS.append(pytest.param(BurstReceiver().receive, id="libzmq"))

by_each_way = pytest.mark.parametrize("receive", WAYS)
needs_libzmq = pytest.mark.skipif(not CAN_CALL_LIBZMQ, reason="bursts are received by pyzmq")

frame_sizes = st.one_of(
    st.integers(0, 20),
    st.integers(0, 30_000),
    st.integers(BUFFER_BYTES - 40, BUFFER_BYTES + 40),
    st.integers(0, 3 * BUFFER_BYTES),
)
frame_counts = st.one_of(st.just(3), st.integers(1, FRAMES_MAX + 3))
messages_of_sizes = st.lists(
    frame_counts.flatmap(lambda count: st.lists(frame_sizes, min_size=count, max_size=count)), max_size=30
)


@contextmanager
def connected() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two sockets in this process: what one has sent, the other has."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as socket:
        for end in (sender, socket):
            end.set_hwm(0)
            end.set(zmq.LINGER, 0)
        sender.bind("inproc://messages")
        socket.connect("inproc://messages")
        yield sender, socket


def kept(message: list[bytes]) -> list[bytes]:
    return message[:FRAMES_MAX]


def test_libzmq_can_be_called_where_kernels_are_compiled() -> None:
    assert CAN_CALL_LIBZMQ == IS_COMPILED


@by_each_way
@given(data=st.data(), sizes=messages_of_sizes)
@examples(60)
def test_what_was_sent_is_received(receive: Receive, data: st.DataObject, sizes: list[list[int]]) -> None:
    sent = [[os.urandom(size) for size in message] for message in sizes]
    with connected() as (sender, socket):
        for message in sent:
            sender.send_multipart(message)
        received: list[list[bytes]] = []
        is_all = False
        while not is_all:
            messages_max = data.draw(st.integers(1, 12))
            messages = receive(socket, messages_max)
            assert len(messages) <= messages_max
            received += messages
            is_all = len(messages) < messages_max
        assert [kept(message) for message in received] == [kept(message) for message in sent]
        assert receive(socket, 1) == []


@by_each_way
def test_more_messages_than_one_call_of_the_kernel_takes(receive: Receive) -> None:
    sent = [[b"topic", b"%d" % number] for number in range(2 * BURST_MESSAGES + 1)]
    with connected() as (sender, socket):
        for message in sent:
            sender.send_multipart(message)
        assert receive(socket, 0) == []
        assert receive(socket, 2 * BURST_MESSAGES) == sent[:-1]
        assert receive(socket, 2 * BURST_MESSAGES) == sent[-1:]


@by_each_way
def test_frames_that_have_no_room_left_or_none_at_all(receive: Receive) -> None:
    sizes = [
        [BUFFER_BYTES],
        [0, BUFFER_BYTES],
        [1, BUFFER_BYTES, 2],
        [BUFFER_BYTES - 1, 1, 1],
        [BUFFER_BYTES + 1],
        [3, 8, BUFFER_BYTES + 1],
        [BUFFER_BYTES + 1, BUFFER_BYTES + 1, 0],
        [3, 8, StreamLimits().message_bytes_max],
        [0],
        [0, 0, 0],
    ]
    sent = [[bytes([number]) * size for size in message] for number, message in enumerate(sizes)]
    with connected() as (sender, socket):
        for message in sent:
            sender.send_multipart(message)
        assert receive(socket, len(sent) + 1) == sent


@by_each_way
@pytest.mark.parametrize("size", [1, BUFFER_BYTES + 1])
@pytest.mark.parametrize("count", [FRAMES_MAX, FRAMES_MAX + 1, 100_000])
def test_a_message_of_too_many_frames_is_refused_and_costs_nothing_else(
    receive: Receive, size: int, count: int
) -> None:
    message = [b"topic", b"12345678", b"payload"]
    with connected() as (sender, socket):
        sender.send_multipart(message)
        sender.send_multipart([b"0"] * (FRAMES_MAX - 1) + [b"8" * size] + [b""] * (count - FRAMES_MAX))
        sender.send_multipart(message)
        first, refused, last = receive(socket, 4)
    assert first == last == message
    assert kept(refused) == [b"0"] * (FRAMES_MAX - 1) + [b"8" * size]
    for split in (split_message, split_replay):
        with pytest.raises(WireError) as error:
            split(refused)
        assert error.value.reason == "frame_count"


@by_each_way
@pytest.mark.parametrize("size", [BUFFER_BYTES, BUFFER_BYTES + 1])
def test_what_was_received_is_given_back_at_once(receive: Receive, size: int) -> None:
    with connected() as (sender, socket):
        tracker = sender.send(bytes(size), copy=False, track=True)
        assert receive(socket, 1) == [[bytes(size)]]
        tracker.wait(10)  # raises NotDone


@by_each_way
def test_errors_of_libzmq_are_raised(receive: Receive) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        with pytest.raises(zmq.ZMQError) as error:
            receive(socket, 1)
        assert error.value.errno == zmq.EFSM
    with pytest.raises(zmq.ZMQError) as error:
        receive(socket, 1)
    assert error.value.errno == zmq.ENOTSOCK


def test_a_closed_source_is_not_read() -> None:
    async def main() -> None:
        transport = ZmqTransport(StreamLimits())
        live = transport.open_live("tcp://127.0.0.1:1", lambda: None)
        replay = transport.open_replay("tcp://127.0.0.1:1", lambda: None)
        for source in (live, replay):
            assert source.drain(1) == []
            source.close()
            with pytest.raises(zmq.ZMQError) as error:
                source.drain(1)
            assert error.value.errno == errno.ENOTSOCK
        transport.close()

    asyncio.run(main())


RECEIVING = """
import zmq
from indexer.stream import zmq_bursts, zmq_kernels
zmq_bursts.compile_kernels()
kernels = (zmq_kernels.receive_burst, zmq_kernels.look_at_frame, zmq_kernels.close_frame)
print(sum(sum(kernel.stats.cache_hits.values()) for kernel in kernels))
print(*zmq_kernels.find_functions().values())
"""


@needs_libzmq
def test_compiled_code_that_is_kept_knows_no_address_of_a_process(tmp_path: Path) -> None:
    addresses: set[int] = set()
    for hits in (0, 3):
        printed = run(RECEIVING, NUMBA_CACHE_DIR=str(tmp_path)).split()
        assert int(printed[0]) == hits
        addresses.update(map(int, printed[1:]))
    files = [file.read_bytes() for file in tmp_path.rglob("*.nb?")]
    assert files
    assert not [address for address in addresses for file in files if address.to_bytes(8, "little") in file]


UNKNOWN = """
import ctypes, zmq
class Library(ctypes.CDLL):
    def __init__(self, name, *rest, **named):
        if name and "_zmq" in name:
            raise OSError("no such library")
        super().__init__(name, *rest, **named)
ctypes.CDLL = Library
from indexer.stream.zmq_bursts import compile_kernels, fastest_receive
compile_kernels()
print(fastest_receive().__name__)
"""


def test_where_libzmq_is_not_found_pyzmq_receives() -> None:
    printed = run(UNKNOWN)
    assert "receive_each" in printed
    assert ("libzmq_not_found" in printed) == IS_COMPILED


def run(program: str, **environment: str) -> str:
    """What it prints."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
