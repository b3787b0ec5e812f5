"""When requests run, and when what they did is published."""

from __future__ import annotations

from indexer.simulate.cache import Cleared, Mutation, Prompt, Stored
from indexer.simulate.pool import VllmCache
from indexer.simulate.scheduler import Job, Scheduler
from indexer.simulate.tree import SglangCache

BLOCK = 4


def vllm_scheduler(blocks: int = 16, **options: int) -> Scheduler:
    return Scheduler(VllmCache(blocks=blocks, block_size=BLOCK, none_hash=b""), **options)


def sglang_scheduler(**options: int) -> Scheduler:
    return Scheduler(SglangCache(pages=16, page_size=BLOCK, adapter_seed=b""), held_steps=3, **options)


def job(prompt_tokens: int, output_tokens: int = 0, first: int = 0) -> Job:
    numbers = tuple(range(first, first + prompt_tokens + output_tokens))
    return Job(Prompt(numbers[:prompt_tokens]), numbers[prompt_tokens:])


def run_out(scheduler: Scheduler) -> list[Mutation]:
    mutations = []
    for _ in range(100):
        mutations += scheduler.step()
        if not scheduler.has_work:
            return mutations
    raise AssertionError("work never ends")


def test_the_last_generated_token_is_not_cached() -> None:
    scheduler = vllm_scheduler()
    scheduler.submit(job(6, output_tokens=2))
    run_out(scheduler)
    assert scheduler.cache.lookup(job(9).prompt) == 4
    scheduler.submit(job(6, output_tokens=3))
    run_out(scheduler)
    assert scheduler.cache.lookup(job(9).prompt) == 8


def test_jobs_wait_while_there_is_no_room() -> None:
    scheduler = vllm_scheduler(blocks=4)
    scheduler.submit(job(12))
    scheduler.submit(job(12, first=100))
    scheduler.step()
    assert scheduler.cache.lookup(job(12, first=100).prompt) == 0
    run_out(scheduler)
    assert scheduler.cache.lookup(job(12, first=100).prompt) == 8


def test_a_prompt_larger_than_the_pool_is_dropped() -> None:
    scheduler = vllm_scheduler(blocks=4)
    scheduler.submit(job(40))
    run_out(scheduler)
    assert scheduler.cut_short == 1


def test_a_request_that_outgrows_the_pool_ends_early() -> None:
    scheduler = vllm_scheduler(blocks=4)
    scheduler.submit(job(8, output_tokens=30))
    run_out(scheduler)
    assert scheduler.cut_short == 1
    assert scheduler.cache.lookup(job(20).prompt) == 16


def test_too_many_waiting_jobs_are_refused() -> None:
    scheduler = vllm_scheduler(waiting_max=1)
    assert scheduler.submit(job(4))
    assert not scheduler.submit(job(4))


def test_a_reset_waits_for_running_requests_and_lets_no_new_one_in() -> None:
    scheduler = vllm_scheduler()
    scheduler.submit(job(8, output_tokens=9))
    scheduler.step()
    scheduler.reset_cache()
    scheduler.submit(job(8, first=100))
    kinds = [type(mutation) for mutation in run_out(scheduler)]
    assert kinds == [Stored, Cleared, Stored]


def test_an_idle_vllm_does_not_publish_its_clear() -> None:
    scheduler = vllm_scheduler()
    scheduler.reset_cache()
    assert scheduler.step() == []
    assert not scheduler.has_work
    assert scheduler.cache.has_mutations
    scheduler.submit(job(8))
    assert [type(mutation) for mutation in scheduler.step()] == [Cleared, Stored]


def test_an_idle_sglang_publishes_at_once() -> None:
    scheduler = sglang_scheduler()
    assert scheduler.has_work
    assert scheduler.step() == [Cleared()]
    assert not scheduler.has_work


def test_a_generating_sglang_holds_events_back_for_some_steps() -> None:
    scheduler = sglang_scheduler(decode_tokens=2)
    scheduler.step()
    scheduler.submit(job(8, output_tokens=30))
    scheduler.submit(job(6, output_tokens=4, first=100))
    assert len(scheduler.step()) == 2
    published = [scheduler.step() for _ in range(6)]
    assert [len(mutations) for mutations in published] == [0, 0, 1, 0, 0, 0]
