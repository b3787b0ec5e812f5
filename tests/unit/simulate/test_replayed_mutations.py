"""Whatever a cache announces, replayed into a naive model, gives the cache's own answers.

The model knows contents, not digests: a digest means the content of its parent and its own tokens and extra keys. It
counts stores minus removes per group and content, and finds the longest hit by trying every length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from indexer.simulate.cache import Cache, Cleared, Image, Mutation, Prompt, Stored
from indexer.simulate.pool import GroupSpec, VllmCache, block_extra_keys
from indexer.simulate.scheduler import Job, Scheduler
from indexer.simulate.tree import SglangCache
from tests.sizes import examples

BLOCK = 4
WINDOW = 10
SGLANG_PAGES = 20

Content = tuple[object, ...]


class NaiveModel:
    """Reference counts of contents, per group; one entry of `windows` per group, None = full attention."""

    def __init__(self, windows: tuple[int | None, ...], prompt_content: Callable[[Prompt, int], Content]) -> None:
        self.windows = windows
        self.prompt_content = prompt_content
        self.contents: dict[bytes, Content] = {}
        self.held: Counter[tuple[int, Content]] = Counter()

    def apply(self, mutation: Mutation) -> None:
        if isinstance(mutation, Cleared):
            self.held.clear()
        elif isinstance(mutation, Stored):
            self.store(mutation)
        else:
            for digest in mutation.digests:
                self.held[mutation.group, self.contents[digest]] -= 1
                assert self.held[mutation.group, self.contents[digest]] >= 0

    def store(self, stored: Stored) -> None:
        content = () if stored.parent is None else self.contents[stored.parent]
        blocks = len(content)
        for index, digest in enumerate(stored.digests):
            assert len(stored.token_ids) == len(stored.digests) * BLOCK
            expected = self.prompt_content(stored.prompt, blocks + index)
            token_ids = stored.token_ids[index * BLOCK : (index + 1) * BLOCK]
            content = (*content, (token_ids, expected))
            assert self.contents.setdefault(digest, content) == content
            self.held[stored.group, content] += 1

    def hit_tokens(self, prompt: Prompt) -> int:
        for blocks in range((len(prompt.token_ids) - 1) // BLOCK, 0, -1):
            if all(self.is_reusable(group, prompt, blocks) for group in range(len(self.windows))):
                return blocks * BLOCK
        return 0

    def is_reusable(self, group: int, prompt: Prompt, blocks: int) -> bool:
        window = self.windows[group]
        first = 0 if window is None else max(0, blocks - -(-(window - 1) // BLOCK))
        return all(self.held[group, self.content(prompt, end)] > 0 for end in range(first + 1, blocks + 1))

    def content(self, prompt: Prompt, blocks: int) -> Content:
        return tuple(
            (prompt.token_ids[index * BLOCK : (index + 1) * BLOCK], self.prompt_content(prompt, index))
            for index in range(blocks)
        )


def vllm_content(prompt: Prompt, block: int) -> Content:
    return block_extra_keys(prompt, block * BLOCK, BLOCK) or ()


def sglang_content(prompt: Prompt, block: int) -> Content:
    return (prompt.lora_name, prompt.cache_salt)


ENGINES: dict[str, tuple[Callable[[], Cache], tuple[int | None, ...], Callable[[Prompt, int], Content], int]] = {
    "vllm": (lambda: VllmCache(blocks=20, block_size=BLOCK, none_hash=b"", chunk_tokens=9), (None,), vllm_content, 0),
    "vllm-hybrid": (
        lambda: VllmCache(
            blocks=34,
            block_size=BLOCK,
            none_hash=b"",
            chunk_tokens=9,
            groups=(GroupSpec(), GroupSpec(WINDOW)),
        ),
        (None, WINDOW),
        vllm_content,
        0,
    ),
    "sglang": (lambda: SglangCache(pages=SGLANG_PAGES, page_size=BLOCK, adapter_seed=b""), (None,), sglang_content, 3),
}

# Prompts are the beginnings of a few documents: they share prefixes, come again, and often end on a block boundary.
DOCUMENT_TOKENS = 48
DOCUMENTS = [tuple(range(split)) + tuple(range(100, 100 + DOCUMENT_TOKENS - split)) for split in (0, 14, 31, 48)]

lengths = st.integers(1, DOCUMENT_TOKENS) | st.integers(1, DOCUMENT_TOKENS // BLOCK).map(lambda blocks: blocks * BLOCK)
token_ids = st.builds(lambda document, length: document[:length], st.sampled_from(DOCUMENTS), lengths)
images = st.builds(Image, st.sampled_from("ab"), st.integers(0, 9), st.integers(1, 6)).map(lambda image: (image,))
plain_prompts = st.builds(Prompt, token_ids)
other_prompts = st.builds(Prompt, token_ids, st.sampled_from((None, "adapter-a")), st.sampled_from((None, "tenant-1")))
image_prompts = st.builds(Prompt, token_ids, images=images)
outputs = st.integers(0, 12).map(lambda count: tuple(range(200, 200 + count)))
jobs = st.builds(Job, st.one_of(plain_prompts, plain_prompts, plain_prompts, other_prompts, image_prompts), outputs)
steps = st.just("step")
actions = st.lists(st.one_of(jobs, jobs, jobs, steps, steps, steps, st.just("reset")), min_size=40, max_size=120)


def drive(engine: str, workload: list[Job | str]) -> None:
    make_cache, windows, content, held_steps = ENGINES[engine]
    model = NaiveModel(windows, content)
    scheduler = Scheduler(make_cache(), held_steps=held_steps, decode_tokens=3, running_max=3)
    asked: list[Prompt] = []
    for action in workload:
        if isinstance(action, Job):
            asked.append(action.prompt)
            scheduler.submit(action)
        elif action == "reset":
            scheduler.reset_cache()
        step_and_compare(scheduler, model, asked[-3:])
    while scheduler.has_work:
        step_and_compare(scheduler, model, asked[-3:])
    if isinstance(scheduler.cache, VllmCache):
        assert scheduler.cache.pool.is_idle
    if isinstance(scheduler.cache, SglangCache):
        assert scheduler.cache.available_pages == SGLANG_PAGES


def step_and_compare(scheduler: Scheduler, model: NaiveModel, prompts: list[Prompt]) -> None:
    mutations = scheduler.step()
    for mutation in mutations:
        model.apply(mutation)
    if mutations and not scheduler.cache.has_mutations:
        for prompt in prompts:
            assert scheduler.cache.lookup(prompt) == model.hit_tokens(prompt)


@examples(60)
@given(actions)
def test_vllm_events_reproduce_the_caches_answers(workload: list[Job | str]) -> None:
    drive("vllm", workload)


@examples(60)
@given(actions)
def test_vllm_hybrid_events_reproduce_the_caches_answers(workload: list[Job | str]) -> None:
    drive("vllm-hybrid", workload)


@examples(60)
@given(actions.map(lambda some: [a for a in some if isinstance(a, str) or not a.prompt.images]))
def test_sglang_events_reproduce_the_caches_answers(workload: list[Job | str]) -> None:
    drive("sglang", workload)
