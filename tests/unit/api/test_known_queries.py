"""What is kept for the kernel that answers known queries is bounded, and forgotten when it no longer holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from indexer.api import known_queries, rosters
from indexer.api.known_queries import REQUEST_BYTES_MAX, SKIPPED, as_input
from indexer.index.publisher import REFUSED_BATCHES_MIN
from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import Registration
from tests.engine_events import decoded, removed, stored
from tests.unit.api.stand_ins import World, empty_world

HEADERS = [(b"date", b"today")]
TOKENS = [1, 2, 3, 4]


class Asker:
    """Asks a world's kernel, and holds what it says against the route."""

    def __init__(self, world: World) -> None:
        self.direct: Any = world.client.app.direct
        self.memory = bytearray(REQUEST_BYTES_MAX)
        self.input = as_input(self.memory)

    def ask(self, path: str = "/v1/prefix-hits", **fields: Any) -> dict[str, Any] | None:
        body = json.dumps({"model": "m", "token_ids": TOKENS, **fields}).encode()
        request = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        self.memory[: len(request)] = request
        answer = self.direct.answer_known(self.input, len(request), HEADERS)
        if answer is None:
            return None
        query = self.direct.find(memoryview(self.memory), len(request))
        told: bytes = answer.partition(b"\r\n\r\n")[2]
        assert told == query.route(body, None).body
        return json.loads(told)  # type: ignore[no-any-return]


def hold(world: World, worker_id: str, model: str = "m") -> Any:
    registration = Registration(worker_id, 0, model, "tcp://127.0.0.1:1", block_size=2, publisher_id=1)
    publisher = world.index.add_publisher(registration)
    publisher.apply(decoded(stored([1, 2], None, TOKENS, 2)), 0, 0)
    return publisher


def workers(answer: dict[str, Any] | None) -> list[str]:
    assert answer is not None
    return [hit["worker_id"] for hit in answer["hits"]]


def test_as_many_publishers_as_there_are_bits_in_several_words() -> None:
    world = empty_world()
    asker = Asker(world)
    for number in range(200):
        hold(world, str(number))
        if number in (0, 63, 64, 128, 199):
            assert workers(asker.ask()) == sorted(map(str, range(number + 1)))


def test_all_holders_are_met_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "MET_AT_ONCE", 3)
    world = empty_world()
    for number in range(9):
        hold(world, str(number))
        world.index.publishers()[-1].apply(decoded(stored([3], None, [100 + number, 0], 2)), 1, 1)
    (space,) = world.index.scope("default", "m").spaces.values()  # type: ignore[union-attr]
    asker = Asker(world)
    assert workers(asker.ask(token_ids=[100, 0, 1])) == ["0"]
    first = space.known[rosters._Roster]
    assert first._met.bit_count() == 4
    for number in range(9):
        assert workers(asker.ask(token_ids=[100 + number, 0, 1])) == [str(number)]
    assert space.known[rosters._Roster] is first


def test_the_newest_number_and_coverage_are_in_the_answer() -> None:
    world = empty_world()
    publisher, asker = hold(world, "w"), Asker(world)
    assert asker.ask()["hits"][0]["sequence_number"] == 0  # type: ignore[index]
    publisher.apply(decoded(removed([2])), 7, 7)
    hit = asker.ask()["hits"][0]  # type: ignore[index]
    assert (hit["sequence_number"], hit["resident_tokens"], hit["coverage"]) == (7, 2, "complete")
    publisher.clear(3.5)
    publisher.apply(decoded(stored([1], None, TOKENS[:2], 2)), 8, 8)
    hit = asker.ask()["hits"][0]  # type: ignore[index]
    assert (hit["sequence_number"], hit["coverage"], hit["coverage_at"]) == (8, "since", 3.5)
    publisher.set_credited(False)
    asker.ask()
    world.index.remove_publisher(publisher.registration.key)
    assert asker.ask() is None  # the model is not known any more
    hold(world, "x")
    assert workers(asker.ask()) == ["x"]


def test_a_publisher_that_holds_nothing_is_named_as_soon_as_it_is_below_complete() -> None:
    world = empty_world()
    hold(world, "w")
    asker = Asker(world)
    assert asker.ask()["warnings"] == []  # type: ignore[index]
    other = world.index.add_publisher(Registration("other", 3, "m", "tcp://127.0.0.1:1", publisher_id=2))
    other.count_gap(1, 2)
    assert "other rank 3" in asker.ask()["warnings"][0]["message"]  # type: ignore[index]
    other.restart()
    assert asker.ask()["warnings"] == []  # type: ignore[index]


def test_shapes_are_forgotten_at_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_queries, "SHAPES_MAX", 8)
    world = empty_world()
    hold(world, "w")
    hold(world, "v", "another")
    asker = Asker(world)
    for number in range(30):
        model, worker = ("another", "v") if number % 7 == 3 else ("m", "w")
        assert workers(asker.ask(model=model, tenant="default" if number % 2 else None)) == [worker]
        assert asker.ask(model=model, cache_salt=str(number)) is None  # the route has something to say of the salt
        assert asker.direct._known._shapes._count <= 8


def test_an_answer_without_hits_is_left_to_the_route_until_its_names_have_been_seen() -> None:
    world = empty_world()
    publisher, asker = hold(world, "w"), Asker(world)
    for fields in ({"lora_name": "tuned"}, {"cache_salt": "salt"}, {"lora_name": "tuned", "cache_salt": "salt"}):
        assert asker.ask(**fields) is None
    publisher.apply(decoded(stored([3], None, [9, 9], 2, lora_name="tuned")), 1, 1)
    assert asker.ask(lora_name="tuned")["hits"] == []  # type: ignore[index]
    assert asker.ask(cache_salt="salt") is None
    publisher.apply(decoded(stored([4], None, [8, 8], 2, extra_keys=[["salt"]])), 2, 2)
    for fields in ({"lora_name": "tuned"}, {"cache_salt": "salt"}, {"lora_name": "tuned", "cache_salt": "salt"}):
        assert asker.ask(**fields)["hits"] == []  # type: ignore[index]
    world.index.remove_publisher(publisher.registration.key)
    hold(world, "another of the same model, whose events have named nobody")
    assert asker.ask(cache_salt="salt") is None


def test_an_answer_without_hits_tells_of_trouble() -> None:
    world = empty_world()
    publisher, asker = hold(world, "w"), Asker(world)

    def warned(*tokens: int, **fields: Any) -> list[str]:
        answer = asker.ask(token_ids=tokens or (7, 7, 7), **fields)
        assert answer is not None
        return [warning["code"] for warning in answer["warnings"]]

    assert warned() == []
    assert asker.ask(token_ids=[7]) is None  # too short
    silent = world.index.add_publisher(Registration("silent", 0, "m", "tcp://127.0.0.1:1", publisher_id=2))
    assert warned() == ["publisher_never_spoke"]
    assert warned(*TOKENS) == [], "there are hits"
    silent.apply(decoded(), 0, 0)
    for number in range(REFUSED_BATCHES_MIN):
        publisher.apply(decoded({"type": "Unheard"}), number + 1, 0)
    assert warned() == ["events_refused"]
    silent.show(Trust(Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST, 1.0))
    assert warned() == ["events_refused", "coverage_below_complete"]
    world.index.remove_publisher(publisher.registration.key)
    assert warned() == ["no_publisher_connected", "coverage_below_complete"]
    world.index.remove_publisher(silent.registration.key)
    world.index.add_publisher(Registration("\u00e9", 0, "m", "tcp://127.0.0.1:1", publisher_id=2))
    assert warned() == ["publisher_never_spoke"], "of a model of which nothing was ever stored"
    assert world.metrics.registry.get_sample_value(
        "indexer_query_warnings_total", {"code": "publisher_never_spoke"}
    ) == 2 * len(["the kernel", "the route"])


def test_where_others_are_asked_nearly_always_few_are_tried() -> None:
    world = empty_world()
    hold(world, "w")
    asker = Asker(world)
    for _ in range(known_queries.LUCK_MAX):
        assert asker.ask(workers=["w"]) is None
    answered = [asker.ask() is not None for _ in range(2 * SKIPPED)]
    assert not any(answered[: SKIPPED - 1])
    assert all(answered[SKIPPED:])
