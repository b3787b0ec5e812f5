from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from indexer.api import query_kernels, request_kernels
from indexer.compiled import IS_COMPILED
from indexer.identity import chain_kernels
from indexer.index import kernels
from indexer.index.content_index import ContentIndex
from indexer.rehearsal import compile_kernels
from indexer.stream import zmq_kernels
from indexer.wire import batch_kernels, token_kernels
from tests.conformance.player import Player, captures
from tests.store_stand_in import DictStore

CALLED_BY_KERNELS = {
    "copy",
    "find_doubts",
    "hash_block",
    "msgpack_prompt",
    "set_bit",
    "write_head",
    "write_hits",
    "write_nothing",
    "write_scores",
}
"""Public names, but nobody else's."""


def compiled_forms() -> Iterator[tuple[str, Any]]:
    """Every kernel with the types that it was compiled for because somebody called it."""
    for module in (batch_kernels, token_kernels, chain_kernels, kernels, request_kernels, query_kernels, zmq_kernels):
        for name, value in vars(module).items():
            if hasattr(value, "signatures"):
                yield f"{module.__name__}.{name}", tuple(value.signatures)


def test_after_a_rehearsal_nothing_is_compiled_any_more() -> None:
    compile_kernels()
    before = dict(compiled_forms())
    assert any(before.values()) == IS_COMPILED
    never_called = {name.rsplit(".")[-1] for name, forms in before.items() if not forms} if IS_COMPILED else set()
    assert {name for name in never_called if not name.startswith("_")} <= CALLED_BY_KERNELS
    for capture in islice(captures(), 0, None, 6):
        play_flush_and_recover(capture)
    assert dict(compiled_forms()) == before


def play_flush_and_recover(capture: Any) -> None:
    player = Player(capture)
    player.play()
    for publisher in player.index.publishers():
        store = DictStore()
        store.flush(publisher)
        again = ContentIndex().add_publisher(publisher.registration)
        store.recover(again)
        again.drop_residencies()
