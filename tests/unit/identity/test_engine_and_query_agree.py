"""What an engine publishes of a prompt, in blocks of any size, has the keys that a query derives from the prompt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.identity.chain import chain_keys, chain_seed, local_hashes, salted_seed
from indexer.identity.extra_keys import from_event, from_query
from indexer.index.content_index import ContentIndex
from tests.engine_events import Engine, stored
from tests.sizes import examples


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    lora_name: str | None
    cache_salt: str | None
    items: list[tuple[str, int, int]]  # identifier, offset, length; in order, not overlapping


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    count = draw(st.integers(16, 200))
    random = Random(draw(st.integers(0, 9)))
    tokens = [random.randrange(40) for _ in range(count)]
    for at in draw(st.lists(st.integers(0, count - 1), max_size=3)):
        tokens[at] = 2**32 + at * 2**50  # an image id
    gaps = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), max_size=4))
    ends = list(accumulate(gap + length for gap, length in gaps))
    names = draw(st.lists(st.sampled_from(["a", "b", "salt", "lora"]), min_size=len(gaps), max_size=len(gaps)))
    items = [
        (name, end - length, length) for name, end, (_, length) in zip(names, ends, gaps, strict=True) if end <= count
    ]
    return Prompt(
        tokens,
        draw(st.sampled_from([None, "lora", "a"])),
        draw(st.sampled_from([None, "salt", "lora", "a"])),
        items,
    )


def published_extra_keys(prompt: Prompt, first: int, blocks: int, block_tokens: int, lookahead: int = 0) -> list[Any]:
    """As vLLM's `to_event_extra_keys`: adapter, items that overlap the block, salt where the block starts at 0."""
    published: list[Any] = []
    for start in range(first * block_tokens, (first + blocks) * block_tokens, block_tokens):
        end = start + block_tokens + lookahead
        entry: list[Any] = [prompt.lora_name] if prompt.lora_name else []
        entry += [[name, at - start] for name, at, length in prompt.items if at < end and at + length > start]
        if prompt.cache_salt and start == 0:
            entry.append(prompt.cache_salt)
        published.append(entry or None)
    return published


def query_keys(prompt: Prompt, granule: int) -> list[int]:
    seed = chain_seed(prompt.lora_name)
    items = from_query([(name, at) for name, at, _ in prompt.items], granule)
    tokens = array("Q", prompt.tokens)
    return chain_keys(
        None, local_hashes(tokens, granule, seed, first_seed=salted_seed(seed, prompt.cache_salt), items=items)
    )


@given(prompts(), st.sampled_from([4, 8, 16]), st.integers(1, 5), st.data())
@examples(200)
def test_keys_from_events_equal_keys_from_the_query(prompt: Prompt, granule: int, k: int, data: st.DataObject) -> None:
    block_tokens = k * granule
    expected = query_keys(prompt, granule)
    total = len(prompt.tokens) // block_tokens
    key, done = None, 0
    while done < total:
        blocks = data.draw(st.integers(1, total - done))
        extra = from_event(
            published_extra_keys(prompt, done, blocks, block_tokens),
            lora_name=prompt.lora_name,
            block_tokens=block_tokens,
            granule=granule,
            at_root=done == 0,
        )
        seed = chain_seed(prompt.lora_name)
        tokens = array("Q", prompt.tokens[done * block_tokens : (done + blocks) * block_tokens])
        first_seed = salted_seed(seed, extra.cache_salt) if done == 0 else None
        keys = chain_keys(key, local_hashes(tokens, granule, seed, first_seed=first_seed, items=extra.items))
        assert keys == expected[done * k : (done + blocks) * k]
        key, done = keys[-1], done + blocks


@given(prompts(), st.sampled_from([(16,), (32,), (16, 32), (16, 64), (48, 32, 16)]), st.data())
@examples(80)
def test_engines_of_any_block_size_answer_for_every_block_of_the_prompt(
    prompt: Prompt, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    index = ContentIndex()
    for worker, block_tokens in enumerate(sizes):
        engine = Engine(index, f"w{worker}")
        total = len(prompt.tokens) // block_tokens
        done, parent = 0, None
        while done < total:
            blocks = data.draw(st.integers(1, total - done))
            hashes = list(range(done + 1, done + blocks + 1))
            tokens = prompt.tokens[done * block_tokens : (done + blocks) * block_tokens]
            extra_keys = published_extra_keys(prompt, done, blocks, block_tokens)
            engine.send(stored(hashes, parent, tokens, block_tokens, lora_name=prompt.lora_name, extra_keys=extra_keys))
            done, parent = done + blocks, hashes[-1]
        held = engine.resident(
            prompt.tokens, lora_name=prompt.lora_name, cache_salt=prompt.cache_salt, multimodal=prompt.items
        )
        assert held == total * block_tokens


@given(prompts(), st.integers(1, 3), st.sampled_from([16, 32]))
@examples(80)
def test_lookahead_hashes_are_answered_while_their_tokens_are_in_the_prompt(
    prompt: Prompt, lookahead: int, block_tokens: int
) -> None:
    engine = Engine(ContentIndex())
    total = (len(prompt.tokens) - lookahead) // block_tokens
    for i in range(total):
        end = (i + 1) * block_tokens
        engine.send(
            stored(
                [i + 1],
                i or None,
                prompt.tokens[end - block_tokens : end],
                block_tokens,
                lora_name=prompt.lora_name,
                extra_keys=published_extra_keys(prompt, i, 1, block_tokens, lookahead),
                lookahead_token_ids=[prompt.tokens[end : end + lookahead]],
            )
        )
    query: dict[str, Any] = {"lora_name": prompt.lora_name, "cache_salt": prompt.cache_salt, "multimodal": prompt.items}
    assert engine.resident(prompt.tokens, **query) == total * block_tokens
    if total:
        shorter = prompt.tokens[: total * block_tokens + lookahead - 1]
        items = [item for item in prompt.items if item[1] < len(shorter)]
        assert engine.resident(shorter, **query | {"multimodal": items}) == (total - 1) * block_tokens


@pytest.mark.parametrize("none", [None, [], [None], [[]], [()]])
def test_every_way_to_say_nothing_gives_the_plain_key(none: Any) -> None:
    engine = Engine(ContentIndex())
    engine.send(stored([1], None, range(16), extra_keys=none))
    assert engine.resident(range(16)) == 16
