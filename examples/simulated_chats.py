"""What `router.py` routes, and to whom: conversations about documents, written by chance, and simulated engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import zmq.asyncio

from indexer.simulate.cache import Prompt
from indexer.simulate.engine import SimulatedEngine
from indexer.simulate.flavours import vllm
from indexer.simulate.scheduler import Job

CONVERSATIONS, TURNS = 12, 4
SYSTEM_PROMPT = list(range(128))
DOCUMENT_TOKENS, TURN_TOKENS = 768, 32
STEP_S = 0.001


class Worker:
    """A simulated vLLM, which holds 16,384 tokens. `load`: tokens that it was sent and that nobody has cached."""

    def __init__(self, worker_id: str, context: zmq.asyncio.Context) -> None:
        self.worker_id = worker_id
        self.engine = SimulatedEngine(worker_id, vllm(blocks=1024), context=context)
        self.load = 0
        self.saved = 0

    async def generate(self, tokens: list[int], expected_hit: int) -> list[int]:
        """The answer to a prompt: what a real router would get by an HTTP request to `worker_id`."""
        output = random.sample(range(32_000), TURN_TOKENS)
        self.saved += self.engine.lookup(Prompt(tuple(tokens)))
        self.load += len(tokens) - expected_hit
        self.engine.submit(Job(Prompt(tuple(tokens)), tuple(output)))
        while self.engine.has_work:
            await self.engine.step()
            await asyncio.sleep(STEP_S)
        self.load -= len(tokens) - expected_hit
        return output


@asynccontextmanager
async def two_workers(name: str) -> AsyncIterator[list[Worker]]:
    context = zmq.asyncio.Context()
    workers = [Worker(f"http://{name}-{number}:8000", context) for number in (1, 2)]
    for worker in workers:
        await worker.engine.start()
    yield workers
    for worker in workers:
        await worker.engine.close()
    context.destroy(linger=0)


async def chat(route: Callable[[list[int]], Awaitable[list[int]]]) -> None:
    """All conversations at once; `route` answers a prompt. All that was said begins the next prompt."""
    await asyncio.gather(*(_converse(route, random.Random(seed)) for seed in range(CONVERSATIONS)))


async def _converse(route: Callable[[list[int]], Awaitable[list[int]]], chance: random.Random) -> None:
    tokens = SYSTEM_PROMPT + chance.choices(range(32_000), k=DOCUMENT_TOKENS)
    for _ in range(TURNS):
        await asyncio.sleep(chance.uniform(0.01, 0.1))  # the user reads and types
        tokens = tokens + chance.choices(range(32_000), k=TURN_TOKENS)
        tokens = tokens + await route(tokens)
