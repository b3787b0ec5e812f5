"""Recorded engine streams through the real store: rows and memory are equal, holder by holder and count by count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from indexer.index.content_index import ContentIndex
from indexer.store.writer import Writer
from tests.conformance.player import Player, captures
from tests.integration.store.making import open_store

FLUSH_EVERY = 50


@pytest.mark.parametrize("path", captures(), ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_after_a_capture_rows_and_memory_are_equal(path: Path, database_url: str) -> None:
    async def scenario() -> None:
        player = Player(path)
        records = list(player.records())  # which registers its workers
        async with open_store(database_url) as store:
            for publisher in player.publishers.values():
                saved = await store.save(replace(publisher.registration, publisher_id=0))
                assert saved == publisher.registration  # a new database counts publishers from 1, as the player does
            writer = Writer(store, player.index)
            for i, record in enumerate(records):
                player.play_one(record)
                if i % FLUSH_EVERY == 0:
                    await writer.flush()
            await writer.flush()
            report = await store.audit(player.index)
            assert report.is_equal, report.to_dict()
            assert report.residencies_in_store == report.residencies_in_memory > 0
            again = ContentIndex()
            for registration in await store.registrations():
                await store.recover(again.add_publisher(registration))
            assert (await store.audit(again)).is_equal

    asyncio.run(scenario())
