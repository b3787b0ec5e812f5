"""Events of every dialect, and hostile ones, over real ZMQ sockets into the real index."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.index.prefix_query import PrefixQuery
from indexer.stream.followed import FollowState
from tests.engine_events import G, numbers, payload, stored
from tests.integration.stream.test_following import applied, run, scene
from tests.unit.index.test_dialects import rfc, standard_hashes, trt, trt_block, trt_stored
from tests.unit.index.test_hostile_events import HOSTILE, MANY

MODEL = "m"
PROMPT = numbers(1, 65)
BLOCKS = [PROMPT[i * G : (i + 1) * G] for i in range(4)]
ARRAY = ["BlockStored", [1, 2], None, PROMPT[: 2 * G], G, None, "GPU", None, [None, None], 0]
SGLANG = {k: v for k, v in stored([-1, 2], None, PROMPT[: 2 * G]).items() if k != "lora_name"}

SAYING: list[tuple[str, bytes]] = [
    ("vllm", payload(stored([1, 2], None, PROMPT[: 2 * G], group_idx=0))),
    ("vllm", payload(ARRAY)),
    ("sglang", payload({"type": "AllBlocksCleared"}, SGLANG)),
    ("trtllm", payload(trt({"type": "created"}), trt_stored(trt_block(1, BLOCKS[0]), trt_block(2, BLOCKS[1])))),
    ("rfc1527", payload(rfc(seq_hashes=[1, 2], token_ids=PROMPT[: 2 * G], parent_hash=None))),
    ("rfc1527", msgspec.msgpack.encode(rfc(seq_hashes=standard_hashes(PROMPT)[:2], base_block_idx=0))),
    (
        "mooncake",
        msgspec.msgpack.encode(
            [
                rfc(seq_hashes=[key], base_block_idx=i, object_key=f"o{i}", medium="cpu")
                for i, key in enumerate(standard_hashes(PROMPT)[:2])
            ]
        ),
    ),
]


@pytest.mark.parametrize(("dialect", "data"), SAYING, ids=[f"{i}-{name}" for i, (name, _) in enumerate(SAYING)])
@pytest.mark.parametrize("is_said", [True, False])
def test_an_engine_of_any_dialect_is_followed_and_known(dialect: str, data: bytes, is_said: bool) -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine, replay=True, engine=dialect if is_said else "auto", model=MODEL)
            engine.publish(data)
            await applied(followed, 0)
            (hit,) = s.index.prefix_hits(PrefixQuery(MODEL, PROMPT)).hits
            assert (hit.resident_tokens, followed.index.dialect) == (2 * G, dialect)
            assert not followed.index.bad_events

    run(main)


def test_hostile_events_cost_neither_the_others_of_their_batch_nor_the_stream() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine, replay=True, engine="auto", model=MODEL)
            hostile: list[Any] = [event for _, event, _ in HOSTILE]
            many = stored(range(100, MANY + 100), None, [70_000 + i % 1_000 for i in range(MANY * G)])
            engine.publish(payload(stored([1], None, BLOCKS[0]), *hostile, stored([2], 1, BLOCKS[1])))
            engine.publish(payload(many))
            engine.publish(payload(*hostile, stored([8], 2, BLOCKS[2])))
            engine.publish(payload(stored([9], 8, BLOCKS[3])))
            await applied(followed, 3)
            (hit,) = s.index.prefix_hits(PrefixQuery(MODEL, PROMPT)).hits
            assert (hit.hit_tokens, hit.coverage) == (4 * G, "complete")
            status = followed.index.status()
            assert sum(status.bad_events.values()) + status.counters["misfit_stores"] == 2 * len(HOSTILE)
            assert status.residencies == MANY + 4
            assert followed.state is FollowState.CONNECTED
            assert not followed.counters["failures"]

    run(main)
