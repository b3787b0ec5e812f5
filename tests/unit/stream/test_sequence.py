"""The state machine of sequence numbers: each input in each state, then what it does over time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from indexer.stream.sequence import RECENT_BATCHES, RECENT_BATCHES_MAX, Gap, Outcome, Sequence, Step

APPLY, DUPLICATE, RESTART = Step.APPLY, Step.DUPLICATE, Step.RESTART


def fingerprint(number: int, run: int = 1) -> int:
    return run * 1_000_000 + number


def live(sequence: Sequence, *numbers: int) -> None:
    for number in numbers:
        assert sequence.live(number, fingerprint(number)) is APPLY


def replayed(sequence: Sequence, *numbers: int) -> None:
    for number in numbers:
        assert sequence.replayed(number, fingerprint(number)) is APPLY


def fresh() -> Sequence:
    return Sequence()


def from_checkpoint_3() -> Sequence:
    return Sequence(3, fingerprint(3))


def live_to_3() -> Sequence:
    sequence = Sequence()
    live(sequence, 0, 1, 2, 3)
    return sequence


def live_to_1_replayed_to_3() -> Sequence:
    sequence = Sequence()
    live(sequence, 0, 1)
    replayed(sequence, 2, 3)
    return sequence


def replayed_to_3() -> Sequence:
    sequence = Sequence()
    replayed(sequence, 0, 1, 2, 3)
    return sequence


def live_0_and_3_between_lost() -> Sequence:
    sequence = Sequence()
    live(sequence, 0)
    sequence.lose(2)
    live(sequence, 3)
    return sequence


def replayed_0_and_3_between_lost() -> Sequence:
    sequence = Sequence()
    replayed(sequence, 0)
    sequence.lose(2)
    replayed(sequence, 3)
    return sequence


def live_to_3_reconnected() -> Sequence:
    sequence = live_to_3()
    sequence.reconnected()
    return sequence


def live_to_1_replayed_to_3_reconnected() -> Sequence:
    sequence = live_to_1_replayed_to_3()
    sequence.reconnected()
    return sequence


def live_to_3_rewound() -> Sequence:
    sequence = live_to_3()
    sequence.rewind()
    return sequence


def live_to_3_begun_again() -> Sequence:
    sequence = live_to_3()
    sequence.begin_again()
    return sequence


# For each state: outcomes of live batches, then of replayed ones. Columns are batches: number, and whether it is the
# batch of the run so far ("same") or of another run ("other"), which for numbers never seen makes no difference.
BATCHES = [(0, "same"), (0, "other"), (2, "same"), (2, "other"), (3, "same"), (3, "other"), (4, "same"), (6, "same")]
G = Gap
TABLE: dict[Callable[[], Sequence], tuple[list[Outcome], list[Outcome]]] = {
    fresh: (
        [APPLY, APPLY, G(0, 1), G(0, 1), G(0, 2), G(0, 2), G(0, 3), G(0, 5)],
        [APPLY, APPLY, G(0, 1), G(0, 1), G(0, 2), G(0, 2), G(0, 3), G(0, 5)],
    ),
    from_checkpoint_3: (
        [RESTART, RESTART, RESTART, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, DUPLICATE, DUPLICATE, DUPLICATE, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    live_to_3: (
        [DUPLICATE, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    live_to_1_replayed_to_3: (
        [DUPLICATE, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    replayed_to_3: (
        [DUPLICATE, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    live_0_and_3_between_lost: (
        [DUPLICATE, RESTART, RESTART, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, RESTART, DUPLICATE, DUPLICATE, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    replayed_0_and_3_between_lost: (
        [DUPLICATE, RESTART, DUPLICATE, DUPLICATE, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, RESTART, DUPLICATE, DUPLICATE, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    live_to_3_reconnected: (
        [RESTART, RESTART, RESTART, RESTART, RESTART, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, DUPLICATE, DUPLICATE, DUPLICATE, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    live_to_1_replayed_to_3_reconnected: (
        [RESTART, RESTART, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
        [DUPLICATE, DUPLICATE, DUPLICATE, RESTART, DUPLICATE, RESTART, APPLY, G(4, 5)],
    ),
    live_to_3_rewound: (
        [RESTART, RESTART, RESTART, RESTART, RESTART, RESTART, G(0, 3), G(0, 5)],
        [APPLY, APPLY, G(0, 1), G(0, 1), G(0, 2), G(0, 2), G(0, 3), G(0, 5)],
    ),
    live_to_3_begun_again: (
        [APPLY, APPLY, G(0, 1), G(0, 1), G(0, 2), G(0, 2), G(0, 3), G(0, 5)],
        [APPLY, APPLY, G(0, 1), G(0, 1), G(0, 2), G(0, 2), G(0, 3), G(0, 5)],
    ),
}


def state_of(sequence: Sequence) -> tuple[object, ...]:
    recent = tuple(sequence._recent.fingerprint(number) for number in range(8))
    return sequence.applied, sequence.newest, sequence.last_live, recent


@pytest.mark.parametrize(
    ("state", "source", "column"),
    [(s, source, c) for s, source, c in itertools.product(TABLE, ("live", "replayed"), range(len(BATCHES)))],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_batch_in_every_state(state: Callable[[], Sequence], source: str, column: int) -> None:
    number, run = BATCHES[column]
    expected = TABLE[state][source == "replayed"][column]
    sequence = state()
    before = state_of(sequence)
    outcome = getattr(sequence, source)(number, fingerprint(number, 1 if run == "same" else 2))
    assert outcome == expected
    if outcome is RESTART or isinstance(outcome, Gap):
        assert state_of(sequence) == before
    if outcome is APPLY:
        assert sequence.applied == number
        assert sequence.newest == (number, fingerprint(number, 1 if run == "same" else 2))
    if outcome is DUPLICATE:
        assert state_of(sequence)[:2] == before[:2]


def test_a_gap_is_answered_again_until_it_is_filled_or_lost() -> None:
    sequence = live_to_3()
    assert sequence.live(6, fingerprint(6)) == Gap(4, 5)
    replayed(sequence, 4)
    assert sequence.live(6, fingerprint(6)) == Gap(5, 5)
    sequence.lose(5)
    assert sequence.live(6, fingerprint(6)) is APPLY


def test_only_what_was_not_applied_can_be_lost() -> None:
    with pytest.raises(AssertionError):
        live_to_3().lose(3)


def test_a_batch_that_came_live_and_by_replay_is_applied_once() -> None:
    sequence = Sequence()
    live(sequence, 0, 1, 2)
    assert sequence.live(5, fingerprint(5)) == Gap(3, 4)
    replayed(sequence, 3, 4, 5, 6)
    assert sequence.live(5, fingerprint(5)) is DUPLICATE
    assert sequence.live(6, fingerprint(6)) is DUPLICATE
    assert sequence.live(7, fingerprint(7)) is APPLY


def test_a_lower_number_after_a_reconnect_is_a_restart_and_the_stream_goes_on() -> None:
    sequence = Sequence(900, fingerprint(900))
    assert sequence.live(1, fingerprint(1, run=2)) is RESTART
    sequence.begin_again()
    assert sequence.live(1, fingerprint(1, run=2)) == Gap(0, 0)
    sequence.lose(0)
    for number in (1, 2, 3):
        assert sequence.live(number, fingerprint(number, run=2)) is APPLY


def test_a_live_batch_of_another_run_is_told_from_what_replay_was_faster_with() -> None:
    sequence = Sequence()
    replayed(sequence, *range(10))
    assert sequence.live(5, fingerprint(5)) is DUPLICATE
    assert sequence.live(6, fingerprint(6, run=2)) is RESTART


def test_memory_of_a_long_stream_is_bounded() -> None:
    sequence = Sequence()
    live(sequence, *range(5 * RECENT_BATCHES))
    assert len(sequence._recent._numbers) <= 2 * RECENT_BATCHES
    last = sequence.next_number - 1
    assert sequence.live(last, fingerprint(last)) is DUPLICATE
    assert sequence.live(0, fingerprint(0)) is RESTART


def test_what_replay_was_faster_with_is_kept_until_the_subscription_has_passed_it() -> None:
    sequence = Sequence()
    replayed(sequence, *range(5 * RECENT_BATCHES))
    for number in range(5 * RECENT_BATCHES):
        assert sequence.live(number, fingerprint(number)) is DUPLICATE
    assert len(sequence._recent._numbers) <= 2 * RECENT_BATCHES


def test_memory_of_a_replay_without_a_live_batch_is_bounded() -> None:
    sequence = Sequence()
    replayed(sequence, *range(RECENT_BATCHES_MAX + 10))
    assert len(sequence._recent._numbers) <= RECENT_BATCHES_MAX
    last = RECENT_BATCHES_MAX + 9
    assert sequence.live(last, fingerprint(last)) is DUPLICATE


@pytest.mark.parametrize(
    "make",
    [fresh, from_checkpoint_3, live_to_3, live_to_1_replayed_to_3, replayed_to_3],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("numbers", [[0, 1, 2], [4, 5, 6], [4, 5, 5], [4, 6, 7], [3, 4], [5, 6], []])
def test_numbers_in_a_row_are_those_that_would_be_applied(make: Callable[[], Sequence], numbers: list[int]) -> None:
    sequence = make()
    counted = sequence.in_a_row(numbers)
    outcomes = [sequence.live(number, fingerprint(number)) for number in numbers]
    applied = list(itertools.takewhile(lambda outcome: outcome is APPLY, outcomes))
    assert counted == len(applied)


@pytest.mark.parametrize("make", [fresh, from_checkpoint_3, live_to_3, replayed_to_3], ids=lambda make: make.__name__)
def test_taking_some_in_a_row_is_the_same_as_one_by_one(make: Callable[[], Sequence]) -> None:
    one_by_one, together = make(), make()
    numbers = list(range(one_by_one.next_number, one_by_one.next_number + 3))
    for number in numbers:
        assert one_by_one.live(number, fingerprint(number)) is APPLY
    assert together.in_a_row(numbers) == 3
    together.take_in_a_row(numbers, [fingerprint(number) for number in numbers])
    assert state_of(together) == state_of(one_by_one)


def test_no_number_is_next_in_a_row_while_a_run_is_applied_again() -> None:
    sequence = live_to_3()
    sequence.rewind()
    assert sequence.in_a_row([0, 1]) == 0
    assert sequence.live(0, fingerprint(0)) is RESTART
