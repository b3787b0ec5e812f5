"""What the kernel answers is, byte by byte, what the route's own function answers: over random fleets and requests."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from indexer.api.known_queries import REQUEST_BYTES_MAX, as_input
from indexer.api.query_kernels import HASH_QUERY_PATH, PREFIX_HITS_PATH, QUERY_PATH
from indexer.http_connection import encode_answer
from indexer.identity.chain import chain_seed, local_hashes
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import REFUSED_BATCHES_MIN, PublisherIndex
from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import Registration
from indexer.wire.columns import PayloadReader, read_batch
from tests.engine_events import cleared, payload, removed, stored
from tests.sizes import examples
from tests.unit.api.stand_ins import empty_world

HEADERS = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
BLOCK = 4
DEPTH = 12  # blocks of a prompt
PROMPTS = 3
MODELS = ["m", 'a model of "another" name \u00e9', "silent"]
WORKERS = ["0", "10", "2", "http://w:8000", '\u00fc"\\', "7310552948117640219", "3"]
TYPES = (
    [b"application/json"] * 6 + [b"application/msgpack"] * 4 + [b"application/json; charset=utf-8", b"text/plain", b""]
)


def prompt(number: int, model: str) -> list[int]:
    """Prompts share their beginnings, and differ from some block on."""
    return [
        token if token < (number + 1) * 2 * BLOCK else token + 1_000_000 * (number + 1)
        for token in range(DEPTH * BLOCK)
    ]


class Fleet:
    """Publishers that store, remove and clear, lose connections and come and go."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.world = empty_world()
        self.direct: Any = self.world.client.app.direct
        self.memory = bytearray(REQUEST_BYTES_MAX)
        self.input = as_input(self.memory)
        self.reader = PayloadReader()
        self.publishers: dict[PublisherIndex, int] = {}
        self.answered: Counter[str] = Counter()
        self.oddity = random.choice([0.0, 0.0, 0.1])

    def come(self) -> None:
        random, index = self.random, self.world.index
        rank = random.choice([0, 0, 0, 0, 1])
        model = random.choice(MODELS[:2])
        registration = Registration(
            random.choice(WORKERS[: random.choice([4, 7])]), rank, model, "tcp://127.0.0.1:1", publisher_id=1,
            engine=random.choice(["vllm", "sglang"]), block_size=BLOCK,
        )  # fmt: skip
        if index.publisher(registration.key) is None:
            publisher = index.add_publisher(registration)
            self.publishers[publisher] = -1
            if random.random() < 0.8:  # else answers without hits say that it has not spoken yet
                self.send(publisher)

    def send(self, publisher: PublisherIndex, *events: Any) -> None:
        number = self.publishers[publisher] = self.publishers[publisher] + 1
        publisher.apply(read_batch(payload(*events), self.reader), number, number)

    def act(self) -> None:
        random = self.random
        if not self.publishers or random.random() < 0.1:
            self.come()
            return
        publisher = random.choice(list(self.publishers))
        chance = random.random()
        if chance < 0.8:
            self.send(publisher, *self.events(publisher))
        elif chance < 0.84:
            publisher.show(random.choice([None, Trust(Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST, 12.5)]))
        elif chance < 0.88:
            publisher.set_credited(random.random() < 0.7)
        elif chance < 0.9:
            publisher.count_gap(self.publishers[publisher] + 1, self.publishers[publisher] + 2, 1_700_000_000.25)
        elif chance < 0.93:
            publisher.restart()
            self.publishers[publisher] = -1
        elif chance < 0.95:
            del self.publishers[publisher]
            self.world.index.remove_publisher(publisher.registration.key)
        elif chance < 0.97:
            for _ in range(REFUSED_BATCHES_MIN):
                self.send(publisher, {"type": "Unheard"})
        elif chance < 0.975:
            query = PrefixQuery(publisher.registration.model, prompt(0, "m"))
            self.world.index.expect(publisher, query, float("inf"))
        else:
            for _ in self.world.index.expire_expected(float("inf")):
                pass

    def events(self, publisher: PublisherIndex) -> list[Any]:
        random, model = self.random, publisher.registration.model
        if random.random() < 0.03:
            return [cleared()]
        tokens = prompt(random.randrange(PROMPTS), model)
        adapter = random.choice([None, None, None, "lora"])
        depth = random.randint(1, DEPTH)
        seed = f"{adapter}"
        hashes = [xxh3_64_intdigest(repr((seed, tokens[: (i + 1) * BLOCK])).encode()) for i in range(depth)]
        if random.random() < 0.25:
            return [removed(hashes[random.randrange(depth) :])]
        extra: dict[str, Any] = {"lora_name": adapter} if adapter else {}
        if not adapter and random.random() < 0.05:
            extra["extra_keys"] = [["salt"], *[None] * (depth - 1)]
        if random.random() < self.oddity:
            extra["medium"] = random.choice(["CPU", "GPU", "STORAGE"])
        return [stored(hashes, None, tokens[: depth * BLOCK], BLOCK, **extra)]

    # ------------------------------------------------------------------ requests

    def request(self) -> bytes:
        random = self.random
        tokens = prompt(random.randrange(PROMPTS + 1), "m")[: random.randint(1, DEPTH * BLOCK)]
        path = random.choice([PREFIX_HITS_PATH, QUERY_PATH, HASH_QUERY_PATH])
        content_type = random.choice(TYPES)
        if path != PREFIX_HITS_PATH and random.random() < 0.8:
            content_type = TYPES[0]
        fields: dict[str, Any] = {"model" if path == PREFIX_HITS_PATH else "model_name": random.choice(MODELS)}
        adapter, salt = random.choice([None, None, None, "lora"]), random.choice([None, None, None, "salt"])
        if path == HASH_QUERY_PATH:
            hashes = local_hashes(b"".join(t.to_bytes(4, "little") for t in tokens), BLOCK, chain_seed(adapter))
            fields["block_hashes"] = [h if random.random() < 0.5 or h < 2**63 else h - 2**64 for h in hashes]
        else:
            fields["token_ids"] = tokens
            if adapter:
                fields["lora_name"] = adapter
            if salt:
                fields["cache_salt"] = salt
        if random.random() < 0.1:
            fields.update(
                random.choice(
                    [
                        {"x": 1},
                        {"workers": ["0"]},
                        {"tenant": "t"},
                        {"multimodal": []},
                        {"tenant_id": "default"},
                        {"detail": "summary"},
                        {"detail": False},
                        {"detail": "tiers"},
                        {"limit": 1},
                        {"min_hit_tokens": BLOCK},
                        {"min_hit_tokens": 0},
                        {"granule": BLOCK},
                        {"content_keys": ["0" * 16]},
                        {"local_hashes": None},
                    ]
                )
            )
        if random.random() < 0.3:
            fields = dict(random.sample(list(fields.items()), len(fields)))
        if b"msgpack" in content_type:
            if random.random() < 0.5 and "token_ids" in fields:
                fields["token_ids"] = b"".join(t.to_bytes(4, "little") for t in tokens)
            body = msgspec.msgpack.encode(fields)
        else:
            body = json.dumps(fields, separators=random.choice([(",", ":"), (", ", ": ")])).encode()
        if random.random() < 0.1:
            body = damaged(body, random)
        lines = [b"POST %b HTTP/1.1" % path.encode(), b"content-length: %d" % len(body)]
        if content_type:
            lines.append(b"content-type: " + content_type)
        return b"\r\n".join([*lines, b"", body])

    def ask(self) -> None:
        request = self.request()
        self.memory[: len(request)] = request
        known = self.direct.answer_known(self.input, len(request), HEADERS)
        query = self.direct.find(memoryview(self.memory), len(request))
        assert query is not None
        answer = query.route(bytes(self.memory[query.start : query.stop]), query.content_type)
        if known is None:
            return
        assert known == encode_answer(answer.status, [*HEADERS, *answer.headers], answer.body)
        self.answered.update(kinds_of(query.route.path, known))


def kinds_of(path: str, answer: bytes) -> list[str]:
    signs = {
        "msgpack": rb"\xadprompt_tokens",
        "hits": rb"worker_id|longest_matched",
        "warning": rb"coverage_below_complete",
        "silent": rb"publisher_never_spoke",
        "refused": rb"events_refused",
        "disconnected": rb"no_publisher_connected",
        "several ranks": rb'"dp":{"0":[0-9]+,',
        "nothing": rb'"hits":\[\],"warnings":\[\]',
    }
    return [path, *(kind for kind, sign in signs.items() if re.search(sign, answer))]


def damaged(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return (
        data[:at]
        + random.choice([b"", b"]", b",", b"0", b"}", random.randbytes(1)])
        + data[at + random.randint(0, 2) :]
    )


def play(random: Random, steps: int) -> Fleet:
    fleet = Fleet(random)
    for _ in range(steps):
        for _ in range(random.randint(1, 3)):
            fleet.act()
        for _ in range(random.randint(1, 3)):
            fleet.ask()
    return fleet


@given(st.integers(0, 2**32).map(Random))
@examples(60)
def test_the_kernel_answers_as_the_route_does(random: Random) -> None:
    play(random, 60)


def test_it_answers_all_kinds_of_queries() -> None:
    answered = sum((play(Random(seed), 60).answered for seed in range(12)), Counter[str]())
    kinds = [PREFIX_HITS_PATH, QUERY_PATH, HASH_QUERY_PATH, "msgpack", "hits", "warning", "several ranks", "nothing"]
    kinds += ["silent", "refused", "disconnected"]
    assert min(answered[kind] for kind in kinds) > 0, answered
