"""The invented requests: reproducible, sharing prefixes, and varied."""

from __future__ import annotations

from indexer.simulate.flavours import ADAPTERS, IMAGES, SALTS
from indexer.simulate.workload import PROMPT_TOKENS_MAX, Assignment, Workload, example_prompt

ALL = frozenset({ADAPTERS, SALTS, IMAGES})


def assignments(seed: int, count: int = 600) -> list[Assignment]:
    workload = Workload(seed, [ALL, ALL - {IMAGES}, ALL])
    return [workload.next_assignment() for _ in range(count)]


def test_the_same_seed_gives_the_same_requests() -> None:
    assert assignments(3, 100) == assignments(3, 100)
    assert assignments(3, 100) != assignments(4, 100)


def test_every_engine_gets_requests_with_adapters_salts_and_images_where_it_takes_them() -> None:
    some = assignments(0)
    assert {a.engine for a in some} == {0, 1, 2}
    assert {a.job.prompt.lora_name for a in some} == {None, "adapter-a", "adapter-b"}
    assert {a.job.prompt.cache_salt for a in some} == {None, "tenant-1", "tenant-2"}
    assert {a.engine for a in some if a.job.prompt.images} == {0, 2}
    assert all(len(a.job.prompt.token_ids) <= PROMPT_TOKENS_MAX for a in some)


def test_an_engine_gets_only_what_it_takes() -> None:
    workload = Workload(1, [frozenset(), frozenset({ADAPTERS}), ALL])
    for prompt in (a.job.prompt for a in (workload.next_assignment() for _ in range(600)) if a.engine < 2):
        assert (prompt.images, prompt.cache_salt) == ((), None)
    some = [workload.next_assignment() for _ in range(600)]
    assert not any(a.job.prompt.lora_name for a in some if a.engine == 0)
    assert any(a.job.prompt.lora_name for a in some if a.engine == 1)


def test_conversations_grow_out_of_shared_beginnings() -> None:
    prompts = [a.job.prompt.token_ids for a in assignments(0)]
    assert len({prompt[:64] for prompt in prompts}) <= 5
    grown = sum(any(later[: len(prompt)] == prompt for later in prompts[i + 1 :]) for i, prompt in enumerate(prompts))
    assert grown > len(prompts) / 2


def test_some_requests_come_twice_and_some_end_on_a_block_boundary() -> None:
    jobs = [a.job for a in assignments(0)]
    assert len(jobs) > len({id(job) for job in jobs})
    assert any(len(job.prompt.token_ids) % 32 == 0 for job in jobs)


def test_the_example_prompt_opens_many_conversations() -> None:
    _, token_ids = example_prompt()
    prompts = [a.job.prompt for a in assignments(0)]
    opened = [p for p in prompts if p.token_ids[: len(token_ids)] == tuple(token_ids) and not p.lora_name]
    assert len(opened) > len(prompts) / 4


def test_images_lie_within_their_prompt() -> None:
    workload = Workload(0, [ALL])
    for _ in range(600):
        prompt = workload.variant(workload.next_assignment().job.prompt)
        assert all(image.offset + image.length <= len(prompt.token_ids) for image in prompt.images)
