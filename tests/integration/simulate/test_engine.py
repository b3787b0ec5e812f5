"""A simulated engine over real sockets, read as a consumer would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from indexer.simulate import flavours
from indexer.simulate.cache import Prompt
from indexer.simulate.engine import END_OF_REPLAY, SimulatedEngine
from indexer.simulate.scheduler import Job

WAIT_S = 5.0


def job(first: int = 0, prompt_tokens: int = 40) -> Job:
    return Job(Prompt(tuple(range(first, first + prompt_tokens))))


@asynccontextmanager
async def started(flavour: flavours.Flavour, buffer_steps: int = 100) -> AsyncIterator[SimulatedEngine]:
    context = zmq.asyncio.Context()
    engine = SimulatedEngine("w0", flavour, context=context, topic="kv@w0", tick_s=0.001, buffer_steps=buffer_steps)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        context.destroy(linger=0)


class Reader:
    """A SUB and a DEALER of one consumer."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.context = zmq.asyncio.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.RECONNECT_IVL, 10)
        self.live.subscribe(b"")
        self.live.connect(engine.endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        self.dealer.connect(engine.replay_endpoint)

    async def receive(self) -> list[bytes]:
        return await asyncio.wait_for(self.live.recv_multipart(), WAIT_S)

    async def receive_first(self) -> list[bytes]:
        """The first batch seen, however many were published before the subscription arrived."""
        for number in range(500):
            self.engine.submit(job(number * 1000, prompt_tokens=20))
            await self.engine.step()
            if await self.live.poll(20):
                return await self.receive()
        raise AssertionError("nothing received")

    async def replay(self, first: int) -> list[list[bytes]]:
        """All answers, the end marker last."""
        await self.dealer.send_multipart([b"", first.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while not answers or END_OF_REPLAY not in answers[-1]:
            answers.append(await asyncio.wait_for(self.dealer.recv_multipart(), WAIT_S))
        return answers

    def close(self) -> None:
        self.context.destroy(linger=0)


@asynccontextmanager
async def reading(engine: SimulatedEngine) -> AsyncIterator[Reader]:
    reader = Reader(engine)
    try:
        yield reader
    finally:
        reader.close()


async def publish(engine: SimulatedEngine, batches: int) -> None:
    for number in range(batches):
        engine.submit(job(number * 1000))
        await engine.step()


def test_batches_come_in_three_frames_numbered_without_holes() -> None:
    async def scenario() -> None:
        async with started(flavours.vllm()) as engine, reading(engine) as reader:
            first = await reader.receive_first()
            second = await reader.receive_first()
            assert [len(first), first[0]] == [3, b"kv@w0"]
            assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1
            timestamp, events, dp_rank = msgspec.msgpack.decode(first[2])
            assert timestamp > 1e9
            assert [event["type"] for event in events] == ["BlockStored"]
            assert dp_rank == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("make_flavour", "frames", "end"),
    [
        (flavours.vllm, 4, [b"", b"", END_OF_REPLAY, b""]),
        (flavours.vllm_array, 3, [b"", END_OF_REPLAY, b""]),
        (flavours.sglang, 3, [b"", END_OF_REPLAY, b""]),
    ],
)
def test_replay_answers_from_the_number_asked_for(
    make_flavour: Callable[[], flavours.Flavour], frames: int, end: list[bytes]
) -> None:
    async def scenario() -> None:
        async with started(make_flavour()) as engine, reading(engine) as reader:
            await publish(engine, 5)
            answers = await reader.replay(2)
            assert [int.from_bytes(answer[-2], "big") for answer in answers[:-1]] == [2, 3, 4]
            assert {len(answer) for answer in answers[:-1]} == {frames}
            assert answers[-1] == end
            assert await reader.replay(99) == [end]

    asyncio.run(scenario())


def test_replay_starts_with_the_oldest_batch_still_buffered() -> None:
    async def scenario() -> None:
        async with started(flavours.vllm(), buffer_steps=3) as engine, reading(engine) as reader:
            await publish(engine, 5)
            answers = await reader.replay(0)
            assert [int.from_bytes(answer[-2], "big") for answer in answers[:-1]] == [2, 3, 4]

    asyncio.run(scenario())


def test_misshapen_replay_requests_get_no_answer_and_break_nothing() -> None:
    async def scenario() -> None:
        async with started(flavours.vllm()) as engine, reading(engine) as reader:
            await publish(engine, 1)
            await reader.dealer.send_multipart([b"x"])
            await reader.dealer.send_multipart([b"", b"short"])
            assert len(await reader.replay(0)) == 2

    asyncio.run(scenario())


def test_a_restart_keeps_the_ports_and_begins_again_at_zero_with_nothing_cached() -> None:
    async def scenario() -> None:
        async with started(flavours.vllm()) as engine, reading(engine) as reader:
            await publish(engine, 5)
            endpoints = engine.endpoint, engine.replay_endpoint
            assert engine.lookup(job().prompt) == 32
            await engine.restart()
            assert (engine.endpoint, engine.replay_endpoint) == endpoints
            assert engine.lookup(job().prompt) == 0
            assert engine.last_sequence_number is None
            await reader.receive_first()
            answers = await reader.replay(0)
            assert int.from_bytes(answers[0][-2], "big") == 0

    asyncio.run(scenario())


def test_an_engine_that_is_down_takes_no_requests() -> None:
    async def scenario() -> None:
        async with started(flavours.vllm()) as engine:
            restart = asyncio.create_task(engine.restart(down_s=0.05))
            while engine.is_up:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not engine.submit(job())
            await restart
            assert engine.submit(job())

    asyncio.run(scenario())


def test_sglang_begins_with_a_batch_that_clears() -> None:
    async def scenario() -> None:
        async with started(flavours.sglang()) as engine, reading(engine) as reader:
            await engine.step()
            answers = await reader.replay(0)
            assert msgspec.msgpack.decode(answers[0][-1])[1] == [{"type": "AllBlocksCleared"}]

    asyncio.run(scenario())


def test_a_running_engine_works_through_its_requests() -> None:
    async def scenario() -> None:
        async with started(flavours.vllm_hybrid()) as engine:
            running = asyncio.create_task(engine.run())
            engine.submit(job())
            async with asyncio.timeout(WAIT_S):
                while engine.lookup(job().prompt) != 32:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(scenario())
