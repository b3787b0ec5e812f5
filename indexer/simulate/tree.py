"""An SGLang-like cache: a radix tree of pages (SGLang's word for blocks), each content held once.

Invariants: a page in the tree has its parent in the tree; a page is evictable if and only if no running request holds
it, and stands in the eviction order before its parent; pages in the tree and pages private to requests together never
exceed the pool.

Beside `pool`: no copies, hence no duplicate announcements; the whole prompt is announced when it is computed, generated
tokens when the request ends; the cache announces that it is empty when it is made.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from indexer.simulate.cache import Cleared, Mutation, Prompt, Removed, Request, Stored

SALT_SEED = b"sglang-cache-salt-v1\0"


@dataclass(slots=True)
class _Page:
    parent: bytes | None
    holders: int


class SglangCache:
    """A cache with SGLang's rules. `adapter_seed` goes into the digests of prompts with a LoRA adapter only."""

    def __init__(self, *, pages: int, page_size: int, adapter_seed: bytes) -> None:
        self.page_size = page_size
        self._adapter_seed = adapter_seed
        self._free = pages
        self._running = 0
        self._tree: dict[bytes, _Page] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        self._mutations: list[Mutation] = [Cleared()]

    @property
    def available_pages(self) -> int:
        """Pages a request could take: all of them while none runs."""
        return self._free + len(self._evictable)

    @property
    def has_mutations(self) -> bool:
        return bool(self._mutations)

    def take_mutations(self) -> list[Mutation]:
        taken, self._mutations = self._mutations, []
        return taken

    def lookup(self, prompt: Prompt) -> int:
        return self._hit_pages(self._digests(prompt, prompt.token_ids), len(prompt.token_ids)) * self.page_size

    def admit(self, prompt: Prompt) -> Request | None:
        assert not prompt.images, "SGLang replaces the placeholders of images before its cache sees them"
        request = Request(prompt, list(prompt.token_ids), self._digests(prompt, prompt.token_ids))
        hit = self._hit_pages(request.digests, len(request.token_ids))
        self._hold(request, hit)
        if not self._take_pages(request, self._pages_of(len(request.token_ids)) - hit):
            self._let_go(request)
            return None
        request.computed = len(request.token_ids)
        self._insert(request)
        self._running += 1
        return request

    def advance(self, request: Request) -> bool:
        held = request.stored + request.private_blocks
        if not self._take_pages(request, self._pages_of(len(request.token_ids)) - held):
            return False
        request.computed = len(request.token_ids)
        return True

    def finish(self, request: Request) -> None:
        computed = request.token_ids[: request.computed]
        request.digests = self._digests(request.prompt, computed)
        self._insert(request)
        self._free += request.private_blocks
        request.private_blocks = 0
        self._let_go(request)
        self._running -= 1

    def reset(self) -> bool:
        if self._running:
            return False
        self._free += len(self._tree)
        self._tree.clear()
        self._evictable.clear()
        self._mutations.append(Cleared())
        return True

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _hit_pages(self, digests: list[bytes], prompt_tokens: int) -> int:
        """Pages that a fresh request skips: whole ones, without a hole, and never the last token."""
        longest = (prompt_tokens - 1) // self.page_size
        return next((i for i in range(longest) if digests[i] not in self._tree), longest)

    def _hold(self, request: Request, pages: int) -> None:
        """The request holds its first pages, which are in the tree: they cannot be evicted now."""
        for digest in request.digests[request.stored : pages]:
            self._evictable.pop(digest, None)
            self._tree[digest].holders += 1
        request.stored = pages

    def _let_go(self, request: Request) -> None:
        """The request holds nothing any more. Last page first, so that a page is evicted before its parent."""
        for digest in reversed(request.digests[: request.stored]):
            page = self._tree[digest]
            page.holders -= 1
            if page.holders == 0:
                self._evictable[digest] = None
        request.stored = 0

    def _take_pages(self, request: Request, count: int) -> bool:
        """Private pages for the request; evicts if needed. False, and nothing done, if there are not enough."""
        if count > self.available_pages:
            return False
        self._evict(count - self._free)
        self._free -= count
        request.private_blocks += count
        return True

    def _evict(self, count: int) -> None:
        """Remove so many pages; one announcement for each stretch of a branch, first page first."""
        stretch: list[bytes] = []
        parent: bytes | None = None
        for _ in range(count):
            digest, _none = self._evictable.popitem(last=False)
            if stretch and digest != parent:
                self._mutations.append(Removed(0, tuple(reversed(stretch))))
                stretch = []
            stretch.append(digest)
            parent = self._tree.pop(digest).parent
            self._free += 1
        if stretch:
            self._mutations.append(Removed(0, tuple(reversed(stretch))))

    def _insert(self, request: Request) -> None:
        """Move computed whole pages into the tree; a page that came to be there meanwhile frees the request's own."""
        first, end = request.stored, request.computed // self.page_size
        fresh = next((i for i in range(first, end) if request.digests[i] not in self._tree), end)
        for index in range(fresh, end):
            self._tree[request.digests[index]] = _Page(request.digests[index - 1] if index else None, 0)
        request.private_blocks -= end - first
        self._free += fresh - first
        self._hold(request, end)
        if fresh < end:
            self._mutations.append(self._stored(request, fresh, end))

    def _stored(self, request: Request, first: int, end: int) -> Stored:
        return Stored(
            group=0,
            digests=tuple(request.digests[first:end]),
            parent=request.digests[first - 1] if first else None,
            token_ids=tuple(request.token_ids[first * self.page_size : end * self.page_size]),
            extra_keys=(None,) * (end - first),
            prompt=request.prompt,
        )

    def _digests(self, prompt: Prompt, token_ids: Sequence[int]) -> list[bytes]:
        """One digest per whole page of these tokens, which begin with the prompt."""
        size = self.page_size
        chain = b"" if prompt.cache_salt is None else hashlib.sha256(SALT_SEED + prompt.cache_salt.encode()).digest()
        digests = []
        for start in range(0, len(token_ids) // size * size, size):
            chain = hashlib.sha256(chain + struct.pack(f"<{size}I", *token_ids[start : start + size])).digest()
            digests.append(chain if prompt.lora_name is None else self._namespaced(prompt.lora_name, chain))
        return digests

    def _namespaced(self, lora_name: str, digest: bytes) -> bytes:
        return hashlib.sha256(self._adapter_seed + lora_name.encode() + digest).digest()
