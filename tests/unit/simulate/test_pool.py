"""The vLLM-like cache, rule by rule."""

from __future__ import annotations

from indexer.simulate.cache import Cleared, Image, Mutation, Prompt, Removed, Request, Stored
from indexer.simulate.pool import GroupSpec, VllmCache, block_extra_keys

BLOCK = 4


def make_cache(blocks: int = 16, groups: tuple[GroupSpec, ...] = (GroupSpec(),), chunk_tokens: int = 512) -> VllmCache:
    return VllmCache(blocks=blocks, block_size=BLOCK, none_hash=b"seed", groups=groups, chunk_tokens=chunk_tokens)


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def run(cache: VllmCache, prompt: Prompt) -> list[Mutation]:
    request = cache.admit(prompt)
    assert request is not None
    compute_all(cache, request)
    cache.finish(request)
    return cache.take_mutations()


def compute_all(cache: VllmCache, request: Request) -> None:
    while not request.is_caught_up:
        assert cache.advance(request)


def counts(mutations: list[Mutation]) -> list[tuple[str, int, int]]:
    return [(type(m).__name__, m.group, len(m.digests)) for m in mutations if not isinstance(m, Cleared)]


def test_only_whole_blocks_are_stored() -> None:
    cache = make_cache()
    assert counts(run(cache, Prompt(tokens(11)))) == [("Stored", 0, 2)]
    assert cache.lookup(Prompt(tokens(11))) == 8
    assert cache.lookup(Prompt(tokens(7))) == 4


def test_the_last_token_is_never_a_hit_and_its_block_is_announced_again() -> None:
    cache = make_cache()
    first = run(cache, Prompt(tokens(8)))
    assert cache.lookup(Prompt(tokens(8))) == 4
    again = run(cache, Prompt(tokens(8)))
    assert isinstance(first[0], Stored)
    assert isinstance(again[0], Stored)
    assert again[0].digests == first[0].digests[1:]
    assert again[0].parent == first[0].digests[0]


def test_each_copy_is_removed_separately_before_the_store_that_needs_its_block() -> None:
    cache = make_cache(blocks=4)
    for _ in range(2):
        run(cache, Prompt(tokens(8)))  # blocks: 0, 1 and a copy of 1
    mutations = run(cache, Prompt(tokens(12, first=100)))
    removed = [m.digests[0] for m in mutations if isinstance(m, Removed)]
    assert [type(m) for m in mutations] == [Removed, Removed, Stored]
    assert removed[0] == removed[1]
    assert cache.lookup(Prompt(tokens(9))) == 4


def test_a_request_is_evicted_tail_first() -> None:
    cache = make_cache(blocks=4)
    stored = run(cache, Prompt(tokens(16)))[0]
    assert isinstance(stored, Stored)
    removed = [m.digests[0] for m in run(cache, Prompt(tokens(8, first=100))) if isinstance(m, Removed)]
    assert removed == [stored.digests[3], stored.digests[2]]


def test_blocks_of_a_running_request_are_not_evicted() -> None:
    cache = make_cache(blocks=4)
    running = cache.admit(Prompt(tokens(8)))
    assert running is not None
    assert cache.admit(Prompt(tokens(12, first=100))) is None
    cache.finish(running)
    assert cache.admit(Prompt(tokens(12, first=100))) is not None


def test_generated_tokens_are_stored_when_their_block_is_full() -> None:
    cache = make_cache()
    request = cache.admit(Prompt(tokens(6)))
    assert request is not None
    cache.take_mutations()
    request.token_ids.append(6)
    assert cache.advance(request)
    assert cache.take_mutations() == []
    request.token_ids.append(7)
    assert cache.advance(request)
    assert counts(cache.take_mutations()) == [("Stored", 0, 1)]
    assert cache.lookup(Prompt(tokens(9))) == 8


def test_growing_without_room_changes_nothing() -> None:
    cache = make_cache(blocks=2)
    request = cache.admit(Prompt(tokens(8)))
    assert request is not None
    request.token_ids.append(8)
    assert not cache.advance(request)
    assert request.computed == 8


def test_a_long_prompt_is_computed_in_chunks() -> None:
    cache = make_cache(chunk_tokens=6)
    request = cache.admit(Prompt(tokens(14)))
    assert request is not None
    compute_all(cache, request)
    assert counts(cache.take_mutations()) == [("Stored", 0, 1), ("Stored", 0, 2)]


def test_a_reset_is_refused_while_a_request_runs() -> None:
    cache = make_cache()
    request = cache.admit(Prompt(tokens(8)))
    assert request is not None
    assert not cache.reset()
    cache.finish(request)
    cache.take_mutations()
    assert cache.reset()
    assert cache.take_mutations() == [Cleared()]
    assert cache.lookup(Prompt(tokens(8))) == 0


def test_adapters_salts_and_images_share_nothing() -> None:
    cache = make_cache(blocks=64)
    plain = tokens(9)
    variants = [
        Prompt(plain),
        Prompt(plain, lora_name="adapter-a"),
        Prompt(plain, cache_salt="tenant-1"),
        Prompt(plain, images=(Image("cat", 1, 2),)),
        Prompt(plain, images=(Image("cat", 2, 2),)),
    ]
    for prompt in variants:
        assert cache.lookup(prompt) == 0
        run(cache, prompt)
        assert cache.lookup(prompt) == 8


def test_extra_keys_have_the_engines_order_and_relative_offsets() -> None:
    prompt = Prompt(tokens(16), lora_name="lora", cache_salt="salt", images=(Image("cat", 3, 6), Image("dog", 9, 1)))
    assert block_extra_keys(prompt, 0, 4) == ("lora", ("cat", 3), "salt")
    assert block_extra_keys(prompt, 4, 4) == ("lora", ("cat", -1))
    assert block_extra_keys(prompt, 8, 4) == ("lora", ("cat", -5), ("dog", 1))
    assert block_extra_keys(Prompt(tokens(16)), 0, 4) is None


HYBRID = (GroupSpec(), GroupSpec(window_tokens=8))  # needs ceil(7 / 4) = 2 blocks


def test_every_group_announces_its_blocks_under_the_same_digests() -> None:
    mutations = run(make_cache(groups=HYBRID), Prompt(tokens(12)))
    assert counts(mutations) == [("Stored", 0, 3), ("Stored", 1, 3)]
    assert isinstance(mutations[0], Stored)
    assert isinstance(mutations[1], Stored)
    assert mutations[0].digests == mutations[1].digests


def test_window_blocks_that_slid_out_are_the_first_to_be_evicted() -> None:
    cache = make_cache(blocks=12, groups=HYBRID, chunk_tokens=16)
    request = cache.admit(Prompt(tokens(17)))
    assert request is not None
    compute_all(cache, request)  # the second chunk frees window blocks 0 and 1: tokens before 16 - 8 + 1 = 9
    cache.finish(request)
    cache.take_mutations()
    other = cache.admit(Prompt(tokens(8, first=100)))
    assert other is not None
    removed = [m for m in cache.take_mutations() if isinstance(m, Removed)]
    assert [(m.group, len(m.digests)) for m in removed] == [(1, 1), (1, 1)]
    assert cache.lookup(Prompt(tokens(17))) == 16
    assert cache.lookup(Prompt(tokens(13))) == 0


def test_the_beginning_of_a_prompt_hits_with_less_than_a_window() -> None:
    cache = make_cache(groups=HYBRID)
    run(cache, Prompt(tokens(5)))
    assert cache.lookup(Prompt(tokens(9))) == 4
