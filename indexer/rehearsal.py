"""Compiles every kernel by using it once, so that no event and no query waits for the compiler.

The first time takes half a minute or more, later ones a second, from the cache on disk (see compiled.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from indexer.api import known_queries
from indexer.api.request_kernels import find_authorization, read_head
from indexer.index import table
from indexer.index.columns import PublisherRows, StoredResidencies
from indexer.index.content_index import ContentIndex
from indexer.index.ghosts import Ghosts
from indexer.index.kernels import find_runs, space_renumber
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import HolderKey
from indexer.index.table import SMALLEST
from indexer.registration import Registration
from indexer.stream import zmq_bursts
from indexer.wire import query_tokens
from indexer.wire.columns import PayloadReader, read_batch

MODEL = "rehearsal"
BLOCK_TOKENS = 16
BLOCKS = 2 * SMALLEST  # so that tables grow


def compile_kernels() -> None:
    query_tokens.compile_kernels()
    read_head(memoryview(bytearray()), 0)
    find_authorization(memoryview(bytearray()), 0)
    known_queries.compile_kernel()
    table.compile_kernels()
    zmq_bursts.compile_kernels()
    index, reader = ContentIndex(), PayloadReader()
    publisher = index.add_publisher(_registration("played", 1))
    for number, payload in enumerate(_payloads()):
        publisher.apply(read_batch(payload, reader), number, 0)
    prompt = np.arange(BLOCK_TOKENS * BLOCKS, dtype=np.uint32).tobytes()
    index.prefix_hits(PrefixQuery(MODEL, prompt))
    for _ in index.explain(PrefixQuery(MODEL, prompt), [publisher]):
        pass
    changes = publisher.take_changes()
    assert changes is not None
    changes.fold()
    loaded = index.add_publisher(_registration("loaded", 2))
    groups = publisher.groups.states()
    loaded.load(PublisherRows(publisher.checkpoint, publisher.granule, groups, [_residencies()]))
    assert loaded.space is not None
    space_renumber(*loaded.space.table.arrays, np.arange(len(loaded.space.masks), dtype=np.uint64))
    index.prefix_hits(PrefixQuery(MODEL, (), local_hashes=(1, 2)))
    find_runs(np.zeros(0, np.uint32), 0, 2, np.zeros(0, np.int64))
    loaded.drop_residencies()
    Ghosts(0).remember(1, 1, 1)
    _play_a_gap(publisher, reader)


def _play_a_gap(publisher: PublisherIndex, reader: PayloadReader) -> None:
    """What is held becomes unverified, is proven, and gets links; what is lost twice is put together."""
    publisher.apply(read_batch(_payload(_stored(range(1, BLOCKS))), reader), 10, 0)
    publisher.count_gap(11, 11)
    for number, payload in enumerate((_payload(_child(BLOCKS - 1)), _payload(_child(3 * BLOCKS))), 12):
        publisher.apply(read_batch(payload, reader), number, 0)
    for key, links in publisher.wanted_links():
        links.learn(np.arange(2, BLOCKS, dtype=np.uint64), np.arange(1, BLOCKS - 1, dtype=np.uint64))
        assert not publisher.residents.use_links(key, links)
    publisher.count_gap(14, 14)
    while publisher.tidy_trust():
        pass


def _child(parent: int) -> dict[str, object]:
    return _stored([3 * BLOCKS + (parent == 3 * BLOCKS)]) | {"parent_block_hash": parent}


def _registration(worker_id: str, publisher_id: int) -> Registration:
    return Registration(worker_id, 0, MODEL, "tcp://127.0.0.1:1", engine="vllm", publisher_id=publisher_id)


def _payloads() -> Iterator[bytes]:
    """Blocks that teach their shape, blocks that are read as columns, some stored twice, some removed."""
    yield _payload(_stored(range(1, BLOCKS)))
    yield _payload(_stored(range(BLOCKS, 2 * BLOCKS)))
    yield _payload(_stored(range(1, BLOCKS)), _removed(range(BLOCKS, 2 * BLOCKS)))
    yield _payload(_removed(range(1, 3)), _removed(range(1, BLOCKS)))


def _payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def _stored(hashes: Sequence[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": list(range(BLOCK_TOKENS * len(hashes))),
        "block_size": BLOCK_TOKENS,
    }


def _removed(hashes: Sequence[int]) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes)}


def _residencies() -> StoredResidencies:
    numbers = np.arange(1, BLOCKS, dtype=np.uint64)
    counts, cohorts = numbers.astype(np.uint32), np.zeros(len(numbers), np.int32)
    return StoredResidencies(HolderKey("GPU", 0, ""), numbers, numbers, numbers * 16, counts, cohorts)
