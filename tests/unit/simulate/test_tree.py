"""The SGLang-like cache, rule by rule."""

from __future__ import annotations

from indexer.simulate.cache import Cleared, Mutation, Prompt, Removed, Stored
from indexer.simulate.tree import SglangCache

PAGE = 4


def make_cache(pages: int = 16) -> SglangCache:
    return SglangCache(pages=pages, page_size=PAGE, adapter_seed=b"seed")


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def run(cache: SglangCache, prompt: Prompt, output: tuple[int, ...] = ()) -> list[Mutation]:
    request = cache.admit(prompt)
    assert request is not None
    request.token_ids += output
    assert cache.advance(request)
    cache.finish(request)
    return cache.take_mutations()


def test_a_new_cache_announces_that_it_is_empty() -> None:
    assert make_cache().take_mutations() == [Cleared()]


def test_nothing_is_announced_twice() -> None:
    cache = make_cache()
    run(cache, Prompt(tokens(8)))
    assert cache.lookup(Prompt(tokens(8))) == 4
    assert run(cache, Prompt(tokens(8))) == []


def test_two_running_requests_with_one_prompt_announce_it_once() -> None:
    cache = make_cache(pages=6)
    first, second = cache.admit(Prompt(tokens(10))), cache.admit(Prompt(tokens(10)))
    assert first is not None
    assert second is not None
    cache.finish(first)
    cache.finish(second)
    assert [type(m) for m in cache.take_mutations()] == [Cleared, Stored]
    assert cache.lookup(Prompt(tokens(10))) == 8


def test_generated_tokens_are_announced_when_the_request_ends() -> None:
    cache = make_cache()
    mutations = run(cache, Prompt(tokens(6)), output=tokens(3, first=6))
    stored = [m for m in mutations if isinstance(m, Stored)]
    assert [m.token_ids for m in stored] == [tokens(4), tokens(4, first=4)]
    assert stored[1].parent == stored[0].digests[0]


def test_leaves_are_evicted_first_and_one_stretch_is_one_event() -> None:
    cache = make_cache(pages=6)
    stored = run(cache, Prompt(tokens(16)))[-1]
    assert isinstance(stored, Stored)
    mutations = run(cache, Prompt(tokens(16, first=100)))
    assert [type(m) for m in mutations] == [Removed, Stored]
    assert isinstance(mutations[0], Removed)
    assert mutations[0].digests == stored.digests[2:]
    assert cache.lookup(Prompt(tokens(16))) == 8


def test_pages_of_a_running_request_are_not_evicted() -> None:
    cache = make_cache(pages=4)
    running = cache.admit(Prompt(tokens(8)))
    assert running is not None
    assert cache.admit(Prompt(tokens(12, first=100))) is None
    cache.finish(running)
    assert cache.admit(Prompt(tokens(12, first=100))) is not None


def test_a_reset_is_refused_while_a_request_runs() -> None:
    cache = make_cache()
    running = cache.admit(Prompt(tokens(8)))
    assert running is not None
    assert not cache.reset()
    cache.finish(running)
    assert cache.reset()
    assert cache.take_mutations()[-1] == Cleared()
    assert cache.lookup(Prompt(tokens(8))) == 0


def test_adapters_and_salts_share_nothing() -> None:
    cache = make_cache(pages=64)
    for prompt in (
        Prompt(tokens(9)),
        Prompt(tokens(9), lora_name="adapter-a"),
        Prompt(tokens(9), cache_salt="tenant-1"),
        Prompt(tokens(9), lora_name="adapter-a", cache_salt="tenant-1"),
    ):
        assert cache.lookup(prompt) == 0
        run(cache, prompt)
        assert cache.lookup(prompt) == 8
