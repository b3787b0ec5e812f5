"""How each server is asked, and how its answers are read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.benchmarks.servers import MODEL, Ours, Peer, clean_environment

PROMPT = list(range(40))


def test_ours_is_asked_natively_where_it_does_not_serve_the_dialect(tmp_path: Path) -> None:
    ours = Ours(tmp_path)
    assert ours.query(PROMPT).path == "/v1/prefix-hits"
    assert json.loads(ours.query(PROMPT).body) == {"model": MODEL, "token_ids": PROMPT}
    assert ours.query_by_hash(PROMPT) is None
    assert ours.read_answer(b'{"hits":[{"worker_id":"7","dp_rank":0,"resident_tokens":32}]}') == {7: 32}


def test_ours_and_the_peer_are_asked_the_same_where_both_serve_the_dialect(tmp_path: Path) -> None:
    ours, peer = Ours(tmp_path), Peer(tmp_path, Path("python"))
    ours.speaks_dialect = True
    assert ours.query(PROMPT) == peer.query(PROMPT)
    assert ours.query_by_hash(PROMPT) == peer.query_by_hash(PROMPT)
    scores = b'{"scores":{"7":{"0":16,"1":16},"9":{"0":32}},"frequencies":[]}'
    assert ours.read_answer(scores) == peer.read_answer(scores) == {7: 32, 9: 32}


def test_binary_tokens_are_unsigned_32_bit_little_endian_and_only_ours_takes_them(tmp_path: Path) -> None:
    request = Ours(tmp_path).query_binary([1, 1 << 31])
    assert request is not None
    assert request.content_type == "application/msgpack"
    assert msgspec.msgpack.decode(request.body)["token_ids"] == b"\x01\0\0\0\0\0\0\x80"
    assert Peer(tmp_path, Path("python")).query_binary([1]) is None


def test_servers_start_without_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_FLUSH_INTERVAL_S", "60")
    assert not any(name.startswith("INDEXER_") for name in clean_environment())
