"""What the client library hashes is what the service would have: prompts are found by either, or by neither."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from indexer.client import MultimodalItem, local_hashes
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import MultimodalItem as IndexItem
from indexer.index.prefix_query import PrefixQuery, PublisherHit
from tests.engine_events import MODEL, Engine, stored
from tests.sizes import examples

NAMES = st.sampled_from([None, "", "my-lora", "ü 名"])
TOKEN = st.integers(0, 2**32 - 1) | st.integers(0, 20) | st.integers(2**32, 2**40)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[int], list[MultimodalItem]]:
    granule = draw(st.sampled_from([1, 16, 24, 64]))
    tokens = draw(st.lists(TOKEN, min_size=granule, max_size=5 * granule))
    starts = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))
    names = [draw(st.sampled_from(["img-a", "img-b", "名"])) for _ in starts]
    return granule, tokens, [MultimodalItem(name, start, 1) for name, start in zip(names, starts, strict=True)]


def hits(index: ContentIndex, query: PrefixQuery) -> list[PublisherHit]:
    return index.prefix_hits(query).hits


@examples(150)
@given(prompts(), NAMES, NAMES, NAMES, NAMES)
def test_a_prompt_is_found_by_the_hashes_of_the_client(
    prompt: tuple[int, list[int], list[MultimodalItem]],
    lora_name: str | None,
    cache_salt: str | None,
    other_lora: str | None,
    other_salt: str | None,
) -> None:
    granule, tokens, items = prompt
    index = ContentIndex()
    blocks = len(tokens) // granule
    whole = tokens[: blocks * granule]
    inside = sorted((item for item in items if item.offset < len(whole)), key=lambda item: item.offset)
    extra_keys: list[list[object]] = [[lora_name] if lora_name else [] for _ in range(blocks)]
    for item in inside:
        extra_keys[item.offset // granule].append([item.identifier, item.offset % granule])
    if cache_salt:
        extra_keys[0].append(cache_salt)
    event = stored(range(1, blocks + 1), None, whole, granule, lora_name=lora_name, extra_keys=extra_keys)
    Engine(index, block_size=granule).send(event)
    for adapter, salt, found in ((lora_name, cache_salt, True), (other_lora, other_salt, False)):
        query = PrefixQuery(
            MODEL, whole, lora_name=adapter, cache_salt=salt, multimodal=tuple(IndexItem(*item) for item in items)
        )
        hashes = local_hashes(tokens, granule, lora_name=adapter, cache_salt=salt, multimodal=items)
        by_hashes = hits(index, PrefixQuery(MODEL, [], local_hashes=array("Q", hashes)))
        assert by_hashes == hits(index, query)
        if found:
            assert by_hashes[0].resident_tokens == len(whole)
