from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from indexer.api import explain as api
from indexer.api.access import Caller
from indexer.api.explain_schemas import Absent, Explanation, JournalPage, Kind, Rule, State
from indexer.api.inspect import hex_key
from indexer.index import explain, journal
from indexer.index.reuse import Rule as RuleOfReuse
from indexer.wire.decode import decode_batch
from tests.engine_events import cleared, numbers, payload, removed, stored
from tests.unit.api.stand_ins import PROMPT_TOKENS_MAX, World, error_of

TOKENS = numbers(1, 64)


@pytest.fixture
def holding(world: World) -> World:
    """Worker `w` holds two of four blocks, and removed another one; worker `v` holds one."""
    world.register()
    world.register(worker_id="v")
    send(world, "w", 0, stored([11, 12, 13], None, TOKENS[:48]))
    send(world, "w", 1, removed([13]))
    send(world, "v", 0, stored([1], None, TOKENS[:16]))
    return world


def send(world: World, worker_id: str, number: int, *events: Any) -> None:
    followed = world.registry.find(worker_id, 0)
    assert followed
    followed.index.apply(decode_batch(payload(*events)), number, number, 100.0 + number)


def ask(world: World, **values: Any) -> Any:
    return world.client.post("/v1/explain", json={"model": "m", "token_ids": TOKENS, "worker_id": "w", **values})


def test_a_hit_is_explained(holding: World) -> None:
    response = ask(holding)
    assert response.status_code == 200
    body = response.json()
    Explanation.model_validate(body, strict=True)
    (told,) = body["publishers"]
    assert (told["hit_tokens"], told["limited_by"]["rule"]) == (32, "missing_block")
    assert told["hit_tokens"] == holding.ask(token_ids=TOKENS).json()["hits"][0]["hit_tokens"]
    last = {"kind": "removed", "sequence_number": 1, "at": 101.0, "medium": "GPU"}
    assert told["first_miss"]["last_event"] == last
    kinds = [part["last_event"] and part["last_event"]["kind"] for part in told["groups"][0]["ranges"]]
    assert kinds == [None, "removed", "never_seen"]
    assert body["parting"] is None


def test_two_publishers_are_compared(holding: World) -> None:
    body = ask(holding, compare_with={"worker_id": "v"}).json()
    Explanation.model_validate(body, strict=True)
    assert [told["worker_id"] for told in body["publishers"]] == ["w", "v"]
    assert body["parting"] == {"start": 16, "worker_id": "w", "dp_rank": 0}


@pytest.mark.parametrize("as_bin", [False, True])
def test_msgpack_gives_the_same_answer(holding: World, as_bin: bool) -> None:
    tokens: Any = b"".join(token.to_bytes(4, "little") for token in TOKENS) if as_bin else TOKENS
    body = msgspec.msgpack.encode({"model": "m", "token_ids": tokens, "worker_id": "w"})
    headers = {"content-type": "application/msgpack"}
    response = holding.client.post("/v1/explain", content=body, headers=headers)
    assert response.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(response.content) == ask(holding).json()


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"worker_id": None}, (422, "invalid_value", "worker_id")),
        ({"worker_id": "x"}, (404, "unknown_publisher", "worker_id")),
        ({"dp_rank": 1}, (404, "unknown_publisher", "worker_id")),
        ({"dp_rank": -1}, (422, "invalid_value", "dp_rank")),
        ({"compare_with": {"worker_id": "x"}}, (404, "unknown_publisher", "compare_with.worker_id")),
        ({"compare_with": {"rank": 1}}, (422, "unknown_field", "compare_with.rank")),
        ({"token_ids": []}, (422, "empty_prompt", "token_ids")),
        ({"token_ids": [1] * (PROMPT_TOKENS_MAX + 1)}, (422, "prompt_too_long", "token_ids")),
        ({"token_ids": [-1]}, (422, "invalid_value", "token_ids[0]")),
        ({"token_ids": "AAAA"}, (422, "invalid_value", "token_ids")),
        ({"workers": ["w"]}, (422, "unknown_field", "workers")),
    ],
)
def test_what_is_wrong_is_named(holding: World, values: dict[str, Any], error: tuple[int, str, str]) -> None:
    assert error_of(ask(holding, **values)) == error


def test_what_is_no_request_is_refused(holding: World) -> None:
    post = holding.client.post
    assert error_of(post("/v1/explain", content=b"{")) == (400, "invalid_json", None)
    assert error_of(post("/v1/explain", content=b"", headers={"content-type": "text/plain"}))[0] == 415
    holding.life.is_recovered = False
    assert error_of(ask(holding))[:2] == (503, "not_ready")


def test_null_means_the_default(holding: World) -> None:
    nulls = dict.fromkeys(("dp_rank", "compare_with", "tenant", "lora_name", "cache_salt", "multimodal"))
    assert ask(holding, **nulls).json() == ask(holding).json()


def test_a_publisher_of_another_model_is_explained_as_such(holding: World) -> None:
    (told,) = ask(holding, model="other").json()["publishers"]
    assert (told["absent"], told["model"], told["hit_tokens"]) == ("other_model", "m", 0)


def members(literal: Any) -> set[str]:
    return {value for part in literal.__args__ for value in (part.__args__ if hasattr(part, "__args__") else [part])}


def test_the_closed_sets_are_those_of_the_index() -> None:
    assert members(Rule) == set(RuleOfReuse)
    assert members(Kind) == set(journal.Kind)
    assert members(State) == {explain.HELD, explain.REMOTE, explain.UNVERIFIED, explain.MISSING}
    assert members(Absent) == {"other_tenant", "other_model", "pool", "not_credited", "nothing_announced"}


@pytest.mark.parametrize(
    "as_of", [12, 12.5, "1970-01-01T00:00:12Z", "1970-01-01 02:00:12+02:00", "1970-01-01T00:00:12"]
)
def test_a_past_time_is_asked_for_in_seconds_or_as_text(holding: World, as_of: Any) -> None:
    assert ask(holding, as_of=as_of).json() == ask(holding).json()


@pytest.mark.parametrize("as_of", [True, "yesterday", 1e300, "9999-99-99", [], "9999-12-31T23:59:59.999999", 4e9])
def test_what_is_no_time_is_refused(holding: World, as_of: Any) -> None:
    assert error_of(ask(holding, as_of=as_of)) == (422, "invalid_value", "as_of")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_time(holding: World, number: float) -> None:
    body = msgspec.msgpack.encode({"model": "m", "token_ids": TOKENS, "worker_id": "w", "as_of": number})
    response = holding.client.post("/v1/explain", content=body, headers={"content-type": "application/msgpack"})
    assert error_of(response) == (422, "invalid_value", "as_of")


def test_a_time_that_nobody_knows_of_is_refused(holding: World) -> None:
    assert error_of(ask(holding, as_of=9)) == (422, "as_of_out_of_reach", "as_of")


def test_who_was_not_registered_then_is_unknown(holding: World) -> None:
    assert error_of(ask(holding, as_of=25)) == (404, "unknown_publisher", "worker_id")


# ---------------------------------------------------------------------- the journal


def read(world: World, **query: Any) -> Any:
    parameters = "&".join(f"{name}={value}" for name, value in {"worker_id": "w", **query}.items())
    return world.client.get(f"/v1/journal?{parameters}")


def test_a_journal_is_read_in_order(holding: World) -> None:
    send(holding, "w", 2, cleared())
    body = read(holding).json()
    JournalPage.model_validate(body, strict=True)
    entries = body["entries"]
    assert [(e["kind"], e["sequence_number"], e["at"]) for e in entries] == [
        ("stored", 0, 100.0),
        ("removed", 1, 101.0),
        ("cleared", 2, 102.0),
    ]
    assert entries[0]["hashes"] == [f"{engine_hash:016x}" for engine_hash in (11, 12, 13)]
    assert entries[1]["content_keys"] == entries[0]["content_keys"][2:]
    assert (entries[0]["medium"], entries[0]["group"], entries[0]["block_tokens"]) == ("GPU", 0, 16)
    assert (body["truncated_before"], body["is_last"]) == (None, True)


def test_a_page_is_described_in_slices(holding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks one event is about."""
    send(holding, "w", 2, stored([21, 22, 23], None, numbers(900, 48)), cleared(), cleared(), cleared())
    send(holding, "w", 3, *(removed([number]) for number in range(21, 24)))
    expected = read(holding).json()["entries"]
    described, steps = 0, list[int]()

    def counting(key: int | None) -> str | None:
        nonlocal described
        described += 1
        return hex_key(key)

    async def in_counted_steps(work: Generator[None, None, Any]) -> Any:
        is_over = False
        while not is_over:
            before = described
            try:
                next(work)
            except StopIteration as end:
                result, is_over = end.value, True
            steps.append(described - before)
        return result

    monkeypatch.setattr(api, "BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(api, "hex_key", counting)
    monkeypatch.setattr(api, "in_slices", in_counted_steps)
    assert read(holding).json()["entries"] == expected
    assert max(steps) == 2
    assert sum(steps) == described == sum(len(entry["hashes"]) for entry in expected) == 10
    steps.clear()
    send(holding, "w", 4, *([cleared()] * 20))
    read(holding)
    assert len(steps) >= 20, "events that name no blocks count as well"


def test_a_page_has_only_so_many_bytes(holding: World) -> None:
    for number in range(2, 102):
        send(holding, "w", number, removed([2**40] * 1_000))
    pages = [read(holding, limit=1_000).json()]
    while not pages[-1]["is_last"]:
        pages.append(read(holding, limit=1_000, after=pages[-1]["next"]).json())
    entries = [entry for page in pages for entry in page["entries"]]
    assert [entry["sequence_number"] for entry in entries] == list(range(102))
    assert max(len(msgspec.json.encode(page)) for page in pages) < 1_000_000


def test_a_cursor_goes_on_where_a_page_ended(holding: World) -> None:
    first = read(holding, limit=1).json()
    assert ([e["kind"] for e in first["entries"]], first["is_last"]) == (["stored"], False)
    second = read(holding, after=first["next"]).json()
    assert ([e["kind"] for e in second["entries"]], second["is_last"]) == (["removed"], True)
    assert second["truncated_before"] is None
    assert read(holding, after=second["next"]).json()["entries"] == []
    send(holding, "w", 2, cleared())
    assert [e["kind"] for e in read(holding, after=second["next"]).json()["entries"]] == ["cleared"]


def test_what_is_gone_is_said(world: World) -> None:
    world.register()
    followed = world.registry.find("w", 0)
    assert followed
    followed.index.journal.bytes_max = 500
    send(world, "w", 0, stored([11, 12, 13], None, TOKENS[:48]))
    send(world, "w", 1, removed([13]))
    body = read(world).json()
    JournalPage.model_validate(body, strict=True)
    assert body["truncated_before"] == {"sequence_number": 0, "at": 100.0}
    assert [e["sequence_number"] for e in body["entries"]] == [1]


def test_a_cursor_of_another_run_begins_again_and_says_so(holding: World) -> None:
    body = read(holding, after="00000000-1-1").json()
    assert body["truncated_before"] == {"sequence_number": None, "at": None}
    assert len(body["entries"]) == 2


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"worker_id": "x"}, (404, "unknown_publisher", "worker_id")),
        ({"dp_rank": "1"}, (404, "unknown_publisher", "worker_id")),
        ({"after": "7"}, (422, "invalid_value", "after")),
        ({"limit": "0"}, (422, "invalid_value", "limit")),
        ({"limit": "1001"}, (422, "invalid_value", "limit")),
        ({"worker_id": ""}, (422, "invalid_value", "worker_id")),
    ],
)
def test_wrong_questions_to_a_journal_are_refused(
    holding: World, query: dict[str, str], error: tuple[int, str, str]
) -> None:
    assert error_of(read(holding, **query)) == error


def test_wide_hashes_are_hexadecimal(world: World) -> None:
    world.register()
    send(world, "w", 0, stored([b"\xab" * 32], None, TOKENS[:16]))
    assert read(world).json()["entries"][0]["hashes"] == ["ab" * 32]


def test_other_tenants_are_not_there(holding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.api.explain.caller_of", lambda _: Caller(frozenset({"mine"})))
    holding.register(worker_id="m", tenant="mine")
    assert error_of(ask(holding)) == (403, "tenant_forbidden", "tenant")
    assert error_of(ask(holding, tenant="mine")) == (404, "unknown_publisher", "worker_id")
    compared = ask(holding, tenant="mine", worker_id="m", compare_with={"worker_id": "w"})
    assert error_of(compared) == (404, "unknown_publisher", "compare_with.worker_id")
    assert error_of(read(holding)) == (404, "unknown_publisher", "worker_id")
    assert read(holding, worker_id="m").status_code == 200
