"""A KV-aware router in a page: it asks the index where most of a prompt is cached, and sends it there.

    kv-indexer serve             # in one terminal
    python examples/router.py    # in another

Two simulated engines stand in for real ones. The same conversations are routed at random, then by the index; in the end
it says how many tokens the engines did not have to compute.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from simulated_chats import Worker, chat, two_workers

from indexer.client import AsyncIndexClient, Failure

MODEL = "router-example"


class Router:
    """Chooses by cached tokens minus load; by load alone if the index gives no signal."""

    def __init__(self, index: AsyncIndexClient, workers: list[Worker]) -> None:
        self._index = index
        self._workers = workers

    async def route(self, tokens: list[int]) -> list[int]:
        answer = await self._index.prefix_hits(MODEL, tokens)
        scores = answer.scores()  # hit tokens by worker; empty without a signal, so that only load counts

        def worth(worker: Worker) -> int:
            return scores.get(worker.worker_id, 0) - worker.load

        best = max(self._workers, key=worth)
        return await best.generate(tokens, expected_hit=scores.get(best.worker_id, 0))


async def main(url: str, deadline_ms: float) -> None:
    async with two_workers("random") as workers:

        async def route_at_random(tokens: list[int]) -> list[int]:
            return await random.choice(workers).generate(tokens, expected_hit=0)

        await chat(route_at_random)
        at_random = sum(worker.saved for worker in workers)

    def tell(failure: Failure) -> None:
        print(f"no signal: {failure.reason}: {failure.message}")

    async with (
        AsyncIndexClient(url, deadline_s=deadline_ms / 1000, on_no_signal=tell) as index,
        two_workers("routed") as workers,
    ):
        for worker in workers:
            engine = worker.engine
            await index.register(worker.worker_id, MODEL, engine.endpoint, replay_endpoint=engine.replay_endpoint)
        await chat(Router(index, workers).route)
        by_index = sum(worker.saved for worker in workers)
        for worker in workers:
            await index.unregister(worker.worker_id)
    print(f"tokens that were not computed: {at_random} at random, {by_index} by the index")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8090")
    parser.add_argument("--deadline-ms", type=float, default=10.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.deadline_ms))
