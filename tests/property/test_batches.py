"""A batch is answered as its prompts are one by one, in both formats; and a prompt by its hashes as by its tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indexer.api.prefix_hits import BATCH_PATH, SHARED
from indexer.api.query_kernels import PREFIX_HITS_PATH
from indexer.identity.chain import chain_keys, chain_seed, local_hashes, salted_seed
from indexer.registration import Registration
from tests.engine_events import decoded, removed, stored
from tests.sizes import examples
from tests.unit.api.stand_ins import World, empty_world

BLOCK, DEPTH = 4, 6
MODELS = ["m", "hybrid", "nobody's"]
ASKED = [*["m"] * 4, *["hybrid"] * 4, "nobody's"]
WORKERS = ["a", "b", "c"]
ITEM = {"identifier": "image", "offset": 1, "length": 2}
FORMATS = {"application/json": msgspec.json, "application/msgpack": msgspec.msgpack}


def prompt(random: Random) -> list[int]:
    """Some share their beginnings."""
    parts_at, part = random.randint(0, DEPTH) * BLOCK, 1_000 * random.randint(1, 2)
    tokens = [token if token < parts_at else token + part for token in range(DEPTH * BLOCK)]
    return tokens[: random.randint(1, len(tokens))]


def play(random: Random) -> World:
    world = empty_world()
    for number, worker_id in enumerate(WORKERS):
        for model in MODELS[: random.choice([1, 2, 2])]:
            registration = Registration(worker_id, MODELS.index(model), model, "tcp://x:1", publisher_id=1 + number)
            publisher = world.index.add_publisher(registration)
            for batch in range(random.randint(0, 6)):
                tokens = prompt(random)
                tokens = tokens[: len(tokens) // BLOCK * BLOCK]
                hashes = [hash((batch, i)) & (2**63 - 1) for i in range(len(tokens) // BLOCK)]
                fields = {
                    "lora_name": random.choice([None, None, None, "lora"]),
                    "medium": random.choice(["GPU", "GPU", "CPU"]),
                }
                if random.random() < 0.3:
                    fields["extra_keys"] = [["salt"], *[None] * (len(hashes) - 1)]
                if model == "hybrid":
                    kind = random.choice(["full_attention", "mamba"])
                    fields |= {"group_idx": len(kind) % 2, "kv_cache_spec_kind": kind}
                events = [stored(hashes, None, tokens, BLOCK, **fields)] if hashes else []
                events += [removed(hashes[-1:])] if random.random() < 0.2 else []
                publisher.apply(decoded(*events), batch, batch)
    return world


def fields_of(random: Random) -> dict[str, Any]:
    """What a query says beside its prompt: some of it."""
    fields = {
        "model": random.choice(ASKED),
        "workers": random.choice([None, ["a"], ["b", "gone"], []]),
        "limit": random.choice([None, 1, 2]),
        "min_hit_tokens": random.choice([None, 0, BLOCK]),
        "detail": random.choice([None, False, True, "summary", "tiers", "groups", "intervals"]),
        "tenant": random.choice([None, "default", "default", "other"]),
    }
    return {name: value for name, value in fields.items() if random.random() < 0.2}


def prompt_of(random: Random) -> dict[str, Any]:
    """By its tokens, perhaps with an adapter, a salt and an item."""
    apart = {"lora_name": "lora", "cache_salt": "salt", "multimodal": [ITEM]}
    return {"token_ids": prompt(random)} | {name: apart[name] for name in apart if random.random() < 0.3}


def hashes_of(random: Random) -> dict[str, Any]:
    tokens = array("I", prompt(random) + [0] * BLOCK)
    seed = chain_seed(random.choice([None, "lora"]))
    hashes = local_hashes(tokens.tobytes(), BLOCK, seed, first_seed=salted_seed(seed, random.choice([None, "salt"])))
    name = random.choice(["local_hashes", "content_keys"])
    keys = hashes if name == "local_hashes" else chain_keys(None, hashes)
    return {name: [f"{key:016x}" for key in keys]} | random.choice([{}, {"granule": BLOCK}, {"granule": 2 * BLOCK}])


def merged(shared: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in fields.items() if value is not None}
    return {name: shared[name] for name in SHARED if shared.get(name) is not None} | said


def post(world: World, path: str, content_type: str, body: Any) -> tuple[int, Any]:
    coding = FORMATS[content_type]
    route = world.client.app.direct._routes[path.encode()]  # type: ignore[attr-defined]
    answer = route(coding.encode(body), content_type)
    return answer.status, coding.decode(answer.body) if answer.status == 200 else None


def packed(fields: dict[str, Any]) -> dict[str, Any]:
    """The same with its long arrays as bytes."""
    found = dict(fields)
    if "token_ids" in found:
        found["token_ids"] = array("I", found["token_ids"]).tobytes()
    for name in found.keys() & {"local_hashes", "content_keys"}:
        found[name] = array("Q", [int(key, 16) for key in found[name]]).tobytes()
    return found


def compare(random: Random, seen: Counter[str]) -> None:
    world = play(random)
    shared = {"model": random.choice(ASKED)} | fields_of(random)
    prompts = [random.choice([prompt_of, prompt_of, hashes_of])(random) | fields_of(random) for _ in range(8)]
    singles = [post(world, PREFIX_HITS_PATH, "application/json", merged(shared, one))[1] for one in prompts]
    for content_type, bodies in (
        ("application/json", prompts),
        ("application/msgpack", prompts),
        ("application/msgpack", [packed(one) for one in prompts]),
    ):
        answer = post(world, BATCH_PATH, content_type, {"prompts": bodies, **shared})
        assert answer == (200, {"answers": singles})
    for single in singles:
        seen.update(warning["code"] for warning in single["warnings"])
        seen.update(name for hit in single["hits"] for name in ("hits", *hit))


@given(st.integers(0, 2**32).map(Random))
@examples(60)
def test_a_batch_is_answered_as_its_prompts_are(random: Random) -> None:
    compare(random, Counter())


def test_it_compares_all_kinds_of_answers() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        compare(Random(seed), seen)
    kinds = ["hits", "tier_tokens", "groups", "spans", "unknown_model", "unknown_worker", "unknown_granule"]
    kinds += ["prompt_too_short", "publisher_never_spoke", "adapter_never_seen", "salt_never_seen", "items_never_match"]
    assert min(seen[kind] for kind in kinds) > 0, seen


@given(st.integers(0, 2**32).map(Random))
@examples(60)
def test_hashes_are_answered_as_the_tokens_that_they_are_of(random: Random) -> None:
    world = play(random)
    tokens, adapter, salt = prompt(random), random.choice([None, "lora"]), random.choice([None, "salt"])
    tokens = (tokens + [0] * BLOCK)[: len(tokens) // BLOCK * BLOCK + BLOCK]
    seed = chain_seed(adapter)
    hashes = local_hashes(array("I", tokens).tobytes(), BLOCK, seed, first_seed=salted_seed(seed, salt))
    fields = {"model": random.choice(MODELS[:2])} | fields_of(random)
    by_tokens = {**fields, "token_ids": tokens, "lora_name": adapter, "cache_salt": salt}
    expected = post(world, PREFIX_HITS_PATH, "application/json", by_tokens)[1]
    for name, keys in (("local_hashes", hashes), ("content_keys", chain_keys(None, hashes))):
        given_so = {**fields, name: [f"{key:016x}" for key in keys]}
        answer = post(world, PREFIX_HITS_PATH, "application/json", given_so)[1]
        assert answer["hits"] == expected["hits"]
