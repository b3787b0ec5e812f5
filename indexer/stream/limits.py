"""The bounds of following streams, and what happens at each. `service.py` fills them from the settings."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds per publisher, but for the last two, which are for all of them.

    `receive_queue_max`: messages in the ZMQ socket; more are lost and seen as a gap.
    `held_batches_max`, `held_bytes_max`: live batches held in memory while a replay runs; at either bound the replay is
    given up (counted as `replays_held_full`) and the live batches are applied.
    `message_bytes_max`: a larger ZMQ message drops the connection.
    `replay_turn_wait_s`: longest wait for a replay's turn. `replay_idle_timeout_s`: silence after which it is given up.
    `replay_timeout_s`: what it may take, with all its tries. `replay_tries_max`: tries in a row without progress. After
    each of the four, what is missing counts as lost.
    `replay_cool_down_s`: an endpoint that did not answer is not asked again before; doubles up to ten times as much.
    `disconnected_credit_s`: a publisher disconnected for longer does not count in answers; 0 = it does.
    `registration_expiry_s`: one disconnected for longer is unregistered; 0 = never.
    `restart_delay_min_s`, `restart_delay_max_s`: pause before a follower that failed is started again; doubles.
    `slice_s`: batches are applied for this long, by all publishers together, before other tasks get a turn.
    `replays_max`: replays at once; more wait for their turn, their live batches are held.
    `publishers_max`: publishers registered at once; one more is refused.
    """

    receive_queue_max: int = 100_000
    held_batches_max: int = 20_000
    held_bytes_max: int = 128 * MIB
    message_bytes_max: int = 64 * MIB
    replay_turn_wait_s: float = 10.0
    replay_idle_timeout_s: float = 2.0
    replay_timeout_s: float = 60.0
    replay_tries_max: int = 3
    replay_cool_down_s: float = 30.0
    disconnected_credit_s: float = 300.0
    registration_expiry_s: float = 0.0
    restart_delay_min_s: float = 0.5
    restart_delay_max_s: float = 30.0
    slice_s: float = 0.0005
    replays_max: int = 64
    publishers_max: int = 10_000
