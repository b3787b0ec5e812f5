"""Followers take turns: in one round of the event loop, all of them together work no longer than one slice and a step.

Purpose: whatever many busy publishers send, a query waits for a slice at most, not for one of each of them. Who comes
when the slice is used up waits for its turn, first come, first served.

Invariants: whoever waits is woken by one of the next rounds, one a round; nobody awaits anything while it works.

If broken: one publisher would keep the others, or all of them the queries, from their turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Pace:
    """Shared by all followers of a registry. `with pace:` around work. Cost: 1 us each, some more for who waits."""

    def __init__(self, slice_s: float, elapsed: Callable[[], float]) -> None:
        self._slice_s = slice_s
        self._elapsed = elapsed
        self._started = 0.0
        self._used_s = 0.0  # of this round's slice
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_round_noted = False

    async def turn(self) -> None:
        """Wait until there is time for another step, after those that have waited for longer."""
        if self._used_s >= self._slice_s or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._note_round()
            await turn

    def __enter__(self) -> None:
        self._started = self._elapsed()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._used_s += self._elapsed() - self._started
        self._note_round()

    def _note_round(self) -> None:
        if not self._is_round_noted:
            self._is_round_noted = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._used_s, self._is_round_noted = 0.0, False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                break
        if self._waiting:
            self._note_round()
