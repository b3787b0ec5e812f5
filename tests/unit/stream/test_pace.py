from __future__ import annotations

import asyncio
import contextlib

import pytest

from indexer.stream.pace import Pace

SLICE_S = 1.0


class Scene:
    """Workers that share a slice; each step takes as long as `now` is moved on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = Pace(SLICE_S, lambda: self.now)
        self.rounds = 0
        self.steps: list[tuple[int, str]] = []  # in which round of the loop who worked

    async def count_rounds(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.rounds += 1

    async def work(self, name: str, steps: int, seconds: float) -> None:
        for _ in range(steps):
            await self.pace.turn()
            with self.pace:
                self.now += seconds
                self.steps.append((self.rounds, name))

    def run(self, *workers: tuple[str, int, float]) -> list[tuple[int, str]]:
        async def main() -> None:
            counting = asyncio.ensure_future(self.count_rounds())
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.gather(*(self.work(*worker) for worker in workers)), 10)
            counting.cancel()

        asyncio.run(main())
        return self.steps

    def most_in_a_round(self) -> int:
        return max(sum(at == each for each, _ in self.steps) for at, _ in self.steps)


def test_steps_that_fit_into_a_slice_share_a_round() -> None:
    assert len({at for at, _ in Scene().run(("a", 1, 0.3), ("b", 1, 0.3), ("c", 1, 0.3))}) == 1


@pytest.mark.parametrize("seconds", [SLICE_S, 5 * SLICE_S])
def test_when_the_slice_is_used_up_others_have_the_loop_before_the_next_step(seconds: float) -> None:
    scene = Scene()
    scene.run(*((name, 5, seconds) for name in "abcd"))
    assert len(scene.steps) == 20
    assert scene.most_in_a_round() == 1


def test_all_of_them_come_in_turns() -> None:
    order = [name for _, name in Scene().run(*((name, 5, SLICE_S) for name in "abcd"))]
    for i in range(len(order)):
        steps = [order[:i].count(name) for name in "abcd"]
        assert max(steps) - min(steps) <= 2


def test_who_has_always_something_to_do_keeps_nobody_from_a_turn() -> None:
    order = [name for _, name in Scene().run(("busy", 50, SLICE_S), ("small", 3, 0.01))]
    assert max(i for i, name in enumerate(order) if name == "small") < 10


def test_who_gives_up_waiting_does_not_keep_the_others_waiting() -> None:
    async def main() -> list[str]:
        scene = Scene()
        first = asyncio.ensure_future(scene.work("first", 1, SLICE_S))
        given_up = asyncio.ensure_future(scene.work("given up", 1, 0.1))
        others = [first, *(asyncio.ensure_future(scene.work(name, 1, 0.1)) for name in "ab")]
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait_for(asyncio.gather(*others), 10)
        return [name for _, name in scene.steps]

    assert asyncio.run(main()) == ["first", "a", "b"]


def test_a_step_that_fails_counts_all_the_same() -> None:
    async def main() -> bool:
        scene = Scene()
        with contextlib.suppress(RuntimeError), scene.pace:
            scene.now += SLICE_S
            raise RuntimeError
        turn = scene.pace.turn()
        waits_for = turn.send(None)
        turn.close()
        return isinstance(waits_for, asyncio.Future)

    assert asyncio.run(main())
