"""The few calls a fleet makes to the service."""

from __future__ import annotations

from typing import Unpack

import msgspec

from indexer.client import AsyncIndexClient, Failure, Outcome
from indexer.client.calls import Settings
from indexer.simulate.cache import Prompt
from indexer.simulate.engine import SimulatedEngine


class ServiceUnreachable(Exception):
    """The service did not answer, or not with what was expected."""


class PublisherState(msgspec.Struct, frozen=True):
    """What the service says of one publisher."""

    worker_id: str
    dp_rank: int
    sequence_number: int | None
    coverage: str


class _Publishers(msgspec.Struct):
    publishers: list[PublisherState]


class ServiceClient:
    """Calls one service. Each call takes at most `timeout_s`, and raises ServiceUnreachable."""

    def __init__(self, url: str, timeout_s: float = 3.0, **settings: Unpack[Settings]) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._index = AsyncIndexClient(url, **settings)

    async def register(self, engine: SimulatedEngine, model: str) -> None:
        """Register an engine; one registered with other values (an earlier fleet's) is replaced."""
        outcome = await self._register(engine, model)
        if outcome.status == 409:
            await self.unregister(engine.worker_id)
            outcome = await self._register(engine, model)
        _check(outcome.failure)

    async def unregister(self, worker_id: str) -> None:
        outcome = await self._index.unregister(worker_id, 0, timeout_s=self._timeout_s)
        if outcome.status != 404:
            _check(outcome.failure)

    async def publishers(self) -> dict[str, PublisherState]:
        """State by worker id, of rank 0."""
        outcome = await self._index.call("GET", "/v1/publishers", timeout_s=self._timeout_s)
        _check(outcome.failure)
        states = msgspec.json.decode(outcome.body, type=_Publishers).publishers
        return {state.worker_id: state for state in states if state.dp_rank == 0}

    async def hit_tokens(self, model: str, prompt: Prompt) -> dict[str, int]:
        """Answers by worker id; workers with no hit are left out."""
        answer = await self._index.prefix_hits(
            model,
            prompt.token_ids,
            lora_name=prompt.lora_name,
            cache_salt=prompt.cache_salt,
            multimodal=prompt.images,
            deadline_s=self._timeout_s,
        )
        _check(answer.failure)
        return answer.scores()

    async def close(self) -> None:
        await self._index.close()

    async def _register(self, engine: SimulatedEngine, model: str) -> Outcome:
        return await self._index.register(
            engine.worker_id,
            model,
            engine.endpoint,
            dp_rank=0,
            replay_endpoint=engine.replay_endpoint,
            engine=engine.flavour.engine,
            timeout_s=self._timeout_s,
        )


def _check(failure: Failure | None) -> None:
    """Raises ServiceUnreachable."""
    if failure is not None:
        raise ServiceUnreachable(failure.message)
