"""Runs requests through a cache, step by step, as an engine's scheduler does.

One step computes one chunk or a few generated tokens of every running request, then admits waiting ones. What the cache
did is handed out for publication as the engine would: vLLM after every step that ran something, SGLang after a step
that admitted a request, when idle, and else only every few steps. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from indexer.simulate.cache import Cache, Mutation, Prompt, Request


@dataclass(frozen=True, slots=True)
class Job:
    """A request to run: its prompt and the tokens it will generate."""

    prompt: Prompt
    output: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    output: deque[int]


class Scheduler:
    """Waiting and running requests over one cache.

    `decode_tokens`: generated per request and step. `held_steps`: 0 publishes like vLLM; otherwise like SGLang, a step
    that only generates is published at the latest with the held_steps-th after it. At `waiting_max` jobs are refused.
    """

    def __init__(
        self, cache: Cache, *, held_steps: int = 0, decode_tokens: int = 8, running_max: int = 4, waiting_max: int = 64
    ) -> None:
        self.cache = cache
        self.cut_short = 0
        self._held_steps = held_steps
        self._steps_held = 0
        self._decode_tokens = decode_tokens
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._waiting: deque[Job] = deque()
        self._running: list[_Running] = []
        self._reset_wanted = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. An idle vLLM with an unsent clear has no work: it stays silent."""
        unsent = self._held_steps > 0 and self.cache.has_mutations
        return bool(self._waiting or self._running or self._reset_wanted or unsent)

    def submit(self, job: Job) -> bool:
        """Queue a job. False if too many wait already."""
        if len(self._waiting) >= self._waiting_max:
            return False
        self._waiting.append(job)
        return True

    def reset_cache(self) -> None:
        """Empty the cache as soon as no request runs; none is admitted before."""
        self._reset_wanted = True

    def step(self) -> list[Mutation]:
        """One step. Returns what is to be published now, in order; often nothing."""
        ran = bool(self._running)
        for running in list(self._running):
            self._advance(running)
        if self._reset_wanted and self.cache.reset():
            self._reset_wanted = False
        admitted = self._admit()
        return self.cache.take_mutations() if self._is_time_to_publish(ran, admitted) else []

    def _is_time_to_publish(self, ran: bool, admitted: bool) -> bool:
        if self._held_steps == 0:
            return ran or admitted
        self._steps_held += 1
        if admitted or not self._running or self._steps_held >= self._held_steps:
            self._steps_held = 0
            return True
        return False

    def _advance(self, running: _Running) -> None:
        """The next chunk of the prompt, else the next generated tokens; the last of them is never computed."""
        request = running.request
        if request.is_caught_up:
            count = min(self._decode_tokens, len(running.output) - 1)
            if count <= 0:
                self._finish(running)
                return
            request.token_ids.extend(running.output.popleft() for _ in range(count))
        if not self.cache.advance(request):
            self.cut_short += 1
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        self.cache.finish(running.request)
        self._running.remove(running)

    def _admit(self) -> bool:
        """Admit waiting jobs in order while there is room. One that does not even fit an idle engine is dropped."""
        admitted = False
        while self._waiting and len(self._running) < self._running_max and not self._reset_wanted:
            job = self._waiting[0]
            request = self.cache.admit(job.prompt)
            if request is None and self._running:
                break
            self._waiting.popleft()
            if request is None:
                self.cut_short += 1
                continue
            self._running.append(_Running(request, deque(job.output)))
            admitted = True
        return admitted
