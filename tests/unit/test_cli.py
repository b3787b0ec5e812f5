from __future__ import annotations

from typing import Any

import pytest

from indexer.cli import ask, format_hits, parse_tokens
from indexer.errors import ServiceError, SettingsError
from tests.client_stand_ins import HostileServer, http, says


@pytest.mark.parametrize("text", ["1 2 3", "1,2,3", "[1, 2, 3]", " 1\n2\t3 \n", "[1,2,3]\n"])
def test_tokens_are_read_in_every_usual_form(text: str) -> None:
    assert parse_tokens(text) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no token ids"),
        ("[]", "no token ids"),
        ("1 -2", "token 1 is '-2'"),
        ("1.5", "token 0"),
        ("\u0661", "token 0"),
    ],
)
def test_what_is_no_token_is_refused_by_place(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        parse_tokens(text)


def hit(worker_id: str, **values: Any) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "dp_rank": 0,
        "hit_tokens": 16,
        "resident_tokens": 32,
        "tiers": {"GPU": 16, "CPU": 32},
        "coverage": "complete",
        "coverage_reason": "from_start",
        "coverage_at": None,
        "sequence_number": 7,
        **values,
    }


def test_hits_are_a_table_with_warnings_below() -> None:
    hits = [hit("http://10.0.0.7:8000"), hit("w", tiers={}, sequence_number=None)]
    text = format_hits({"prompt_tokens": 40, "hits": hits, "warnings": [{"code": "c", "message": "beware"}]})
    assert text.splitlines() == [
        "prompt of 40 tokens",
        "worker                rank  hit  resident  tiers          coverage  batch",
        "http://10.0.0.7:8000  0     16   32        GPU=16 CPU=32  complete  7",
        "w                     0     16   32        -              complete  -",
        "warning: beware",
    ]


def test_no_hits_are_said_in_words() -> None:
    text = format_hits({"prompt_tokens": 1, "hits": [], "warnings": []})
    assert text.splitlines() == ["prompt of 1 tokens", "no engine holds any of it"]


def test_an_address_that_is_none_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match=r"'127\.0\.0\.1:8090' is no address"):
        ask("127.0.0.1:8090", "GET", "/v1/audit")


def test_another_service_at_the_address_is_told_apart() -> None:
    with HostileServer(says(http("200 OK", b"<html>"))) as server, pytest.raises(ServiceError, match="another service"):
        ask(server.url, "GET", "/v1/audit")
