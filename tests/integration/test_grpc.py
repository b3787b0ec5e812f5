"""The contract of the gRPC services, asked by a client that protoc made of the .proto files."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from indexer.api.access import Keyring
from indexer.api.ports import ApiLimits, Services
from indexer.api.rpc import messages, services
from indexer.errors import ListenError
from indexer.grpc_server import GrpcServer
from indexer.index.content_index import ContentIndex
from indexer.keys import Key, Role, digest_of
from indexer.registration import Registration
from indexer.settings import Settings
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import StandInLife, StandInRegistry, StandInStore, stand_in_services

BLOCK = 16
PROMPT = list(range(1, 65))
PROTOS = Path(services.__file__).parent
PROMPT_TOKENS_MAX = 500
HASHES = [2**64 - 5, 2**63, 7, 8]
SIGNED = [h - 2**64 if h >= 2**63 else h for h in HASHES]


@dataclass(frozen=True)
class Generated:
    """What protoc made."""

    scores: ModuleType
    scores_grpc: ModuleType
    prefix: ModuleType
    prefix_grpc: ModuleType
    descriptors: dict[str, descriptor_pb2.FileDescriptorProto]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generated]:
    out = tmp_path_factory.mktemp("generated")
    files = [str(PROTOS / name) for name in ("indexer.proto", "kv_indexer.proto")]
    targets = [f"--python_out={out}", f"--grpc_python_out={out}", f"--descriptor_set_out={out / 'set'}"]
    assert protoc.main(["protoc", f"-I{PROTOS}", *targets, *files]) == 0
    described = descriptor_pb2.FileDescriptorSet.FromString((out / "set").read_bytes())
    names = "indexer_pb2", "indexer_pb2_grpc", "kv_indexer_pb2", "kv_indexer_pb2_grpc"
    sys.path.insert(0, str(out))
    try:
        yield Generated(*map(importlib.import_module, names), {file.name: file for file in described.file})
    finally:
        sys.path.remove(str(out))
        for name in names:
            sys.modules.pop(name, None)


@dataclass
class World:
    index: ContentIndex
    life: StandInLife
    services: Services
    keyring: Keyring | None = None

    def add(self, worker_id: str, dp_rank: int = 0, **values: Any) -> None:
        values = {"model": "m", "endpoint": "tcp://127.0.0.1:1", "engine": "sglang", **values}
        self.index.add_publisher(Registration(worker_id, dp_rank, publisher_id=1, **values))

    def store(self, worker_id: str, dp_rank: int, first: int, blocks: int, medium: str = "GPU", **more: Any) -> None:
        publisher = next(p for p in self.index.publishers() if p.registration.key == (worker_id, dp_rank))
        stop = first + blocks
        event = {
            "type": "BlockStored",
            "block_hashes": SIGNED[first:stop],
            "parent_block_hash": SIGNED[first - 1] if first else None,
            "token_ids": PROMPT[first * BLOCK : stop * BLOCK],
            "block_size": BLOCK,
            "medium": medium,
            **more,
        }
        publisher.apply(decode_batch(msgspec.msgpack.encode([1.0, [event], 0])), 0, 1)


@pytest.fixture
def world() -> World:
    """Blocks of "http://a": GPU, CPU, GPU; of "b": one on rank 0, two on rank 1; of "hole": 0 and 2."""
    index, life = ContentIndex(), StandInLife()
    limits = ApiLimits(1_000_000, PROMPT_TOKENS_MAX, 50)
    world = World(index, life, stand_in_services(index, StandInRegistry(index), life, StandInStore(), limits))
    for worker_id, dp_rank in (("http://a", 0), ("b", 0), ("b", 1), ("hole", 0)):
        world.add(worker_id, dp_rank)
    world.store("http://a", 0, 0, 1)
    world.store("http://a", 0, 1, 1, "CPU")
    world.store("http://a", 0, 2, 1)
    world.store("b", 0, 0, 1)
    world.store("b", 1, 0, 2)
    world.store("hole", 0, 0, 1)
    world.store("hole", 0, 2, 1)
    return world


def ask(world: World, call: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> Any:
    """What a call over a real connection gives."""

    async def scenario() -> Any:
        server = GrpcServer(Settings(grpc_port=0), world.services, world.keyring)
        serving = asyncio.create_task(server.serve())
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                return await call(channel)
        finally:
            await server.close()
            await serving

    return asyncio.run(scenario())


def status_of(world: World, call: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        ask(world, call)
    return error.value.code(), error.value.details() or ""


def pod_scores(
    generated: Generated, metadata: Any = None, **fields: Any
) -> Callable[[grpc.aio.Channel], Awaitable[Any]]:
    request = generated.scores.GetPodScoresRequest(**{"model_name": "m", "token_ids": PROMPT} | fields)
    options = {"timeout": 30, "metadata": metadata}
    return lambda channel: generated.scores_grpc.IndexerServiceStub(channel).GetPodScores(request, **options)


def match_prefix(
    generated: Generated, metadata: Any = None, **fields: Any
) -> Callable[[grpc.aio.Channel], Awaitable[Any]]:
    request = generated.prefix.MatchExternalKvPrefixRequest(**{"hashes": SIGNED} | fields)
    options = {"timeout": 30, "metadata": metadata}
    return lambda channel: generated.prefix_grpc.KVIndexerStub(channel).MatchExternalKvPrefix(request, **options)


def test_the_messages_are_those_of_the_proto_files(generated: Generated) -> None:
    for name, package, tables in (
        ("indexer.proto", messages.SCORES_PACKAGE, messages.SCORES_MESSAGES),
        ("kv_indexer.proto", messages.PREFIX_PACKAGE, messages.PREFIX_MESSAGES),
    ):
        described = generated.descriptors[name]
        described.ClearField("service")
        for message in described.message_type:
            for field in message.field:
                field.ClearField("json_name")
        ours = messages.describe_file(name, package, tables)
        assert sorted(map(str, described.message_type)) == sorted(map(str, ours.message_type))
        assert (described.package, described.syntax) == (ours.package, ours.syntax)


# ---------------------------------------------------------------------- llm-d


def scored(answer: Any) -> list[tuple[str, float, int | None]]:
    return [
        (s.pod, round(s.score, 6), s.data_parallel_rank if s.HasField("data_parallel_rank") else None)
        for s in answer.scores
    ]


def test_pods_are_scored_by_the_tier_of_each_block(world: World, generated: Generated) -> None:
    answer = ask(world, pod_scores(generated))
    assert scored(answer) == [("http://a", 2.8, None), ("b", 2.0, 1), ("b", 1.0, 0), ("hole", 1.0, None)]


def test_only_candidates_are_scored_with_the_weights_that_are_given(world: World, generated: Generated) -> None:
    weights = [generated.scores.TierWeight(tier="cpu", weight=0.1)]
    answer = ask(world, pod_scores(generated, pod_identifiers=["http://a", "gone"], tier_weights=weights))
    assert scored(answer) == [("http://a", 2.1, None)]


def test_tokens_count_beside_a_prompt(world: World, generated: Generated) -> None:
    assert scored(ask(world, pod_scores(generated, prompt="Hello", pod_identifiers=["hole"])))[0][0] == "hole"


@pytest.mark.parametrize("fields", [{"model_name": "x"}, {"tenant": "t"}])
def test_an_unknown_model_is_a_warning_beside_the_answer(
    world: World, generated: Generated, fields: dict[str, str]
) -> None:
    request = generated.scores.GetPodScoresRequest(**{"model_name": "m", "token_ids": PROMPT} | fields)

    async def call(channel: grpc.aio.Channel) -> tuple[Any, Any]:
        under_way = generated.scores_grpc.IndexerServiceStub(channel).GetPodScores(request)
        return await under_way, dict(await under_way.trailing_metadata())

    answer, metadata = ask(world, call)
    assert (scored(answer), metadata["warnings"]) == ([], "unknown_model")


@pytest.mark.parametrize("fields", [{"lora_name": "a"}, {"cache_salt": "a"}])
def test_an_adapter_or_a_salt_is_another_prompt(world: World, generated: Generated, fields: dict[str, str]) -> None:
    assert scored(ask(world, pod_scores(generated, **fields))) == []


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"token_ids": [], "prompt": "Hello"}, grpc.StatusCode.INVALID_ARGUMENT, "prompt: there is no tokenizer"),
        ({"token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: there is no tokenizer"),
        ({"token_ids": [1] * (PROMPT_TOKENS_MAX + 1)}, grpc.StatusCode.OUT_OF_RANGE, "token_ids: 501"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    world: World, generated: Generated, fields: dict[str, Any], status: grpc.StatusCode, words: str
) -> None:
    code, details = status_of(world, pod_scores(generated, **fields))
    assert code is status
    assert details.startswith(words)


@pytest.mark.parametrize("weight", [-1.0, 1e9, float("nan")])
def test_a_weight_out_of_bounds_is_refused(world: World, generated: Generated, weight: float) -> None:
    weights = [generated.scores.TierWeight(tier="GPU", weight=weight)]
    code, details = status_of(world, pod_scores(generated, tier_weights=weights))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "tier_weights")


# ---------------------------------------------------------------------- SGLang's indexer


def matched(answer: Any) -> list[tuple[str, int]]:
    assert all(match.worker_id == match.worker_address for match in answer.matches)
    return [(match.worker_address, match.matched_prefix_blocks) for match in answer.matches]


def test_blocks_are_matched_by_the_engines_own_hashes(world: World, generated: Generated) -> None:
    answer = ask(world, match_prefix(generated))
    assert matched(answer) == [("http://a", 3), ("b", 2), ("hole", 1)]
    assert (answer.best_prefix_blocks, answer.blocks_read) == (3, 4)


def test_no_more_blocks_are_looked_at_than_allowed(world: World, generated: Generated) -> None:
    answer = ask(world, match_prefix(generated, max_blocks=2))
    assert matched(answer) == [("b", 2), ("http://a", 2), ("hole", 1)]
    assert (answer.best_prefix_blocks, answer.blocks_read) == (2, 2)


@pytest.mark.parametrize("hashes", [[], [99], [99, SIGNED[0]]])
def test_nothing_is_matched_behind_a_hole(world: World, generated: Generated, hashes: list[int]) -> None:
    answer = ask(world, match_prefix(generated, hashes=hashes))
    assert (matched(answer), answer.best_prefix_blocks, answer.blocks_read) == ([], 0, min(1, len(hashes)))


def test_models_and_tenants_are_told_apart(world: World, generated: Generated) -> None:
    world.add("other", model="n")
    world.store("other", 0, 0, 4)
    world.add("foreign", tenant="t")
    world.store("foreign", 0, 0, 4)
    world.add("store", options={"pool": None})
    world.store("store", 0, 0, 4)
    assert matched(ask(world, match_prefix(generated)))[0] == ("other", 4)
    assert matched(ask(world, match_prefix(generated, model="n"))) == [("other", 4)]
    assert matched(ask(world, match_prefix(generated, tenant="t"))) == [("foreign", 4)]


def test_all_groups_of_full_attention_must_have_a_block(world: World, generated: Generated) -> None:
    world.add("hybrid", model="h", engine="vllm")
    for group, kind, blocks in ((0, "full_attention", 3), (1, "full_attention", 2), (2, "sliding_window", 1)):
        world.store("hybrid", 0, 0, blocks, group_idx=group, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=16)
    assert matched(ask(world, match_prefix(generated, model="h"))) == [("hybrid", 2)]


def test_too_many_hashes_are_out_of_range(world: World, generated: Generated) -> None:
    code, _ = status_of(world, match_prefix(generated, hashes=[1] * (PROMPT_TOKENS_MAX + 1)))
    assert code is grpc.StatusCode.OUT_OF_RANGE


# ---------------------------------------------------------------------- both


def test_nothing_is_answered_before_recovery(world: World, generated: Generated) -> None:
    world.life.is_recovered, world.life.lacks = False, ["the index is being recovered"]
    for call in (pod_scores(generated), match_prefix(generated)):
        assert status_of(world, call) == (grpc.StatusCode.UNAVAILABLE, "the index is being recovered")


@pytest.mark.parametrize("call", [pod_scores, match_prefix])
def test_with_keys_a_token_is_needed_that_is_for_the_tenant(
    world: World, generated: Generated, call: Callable[..., Any]
) -> None:
    world.keyring = Keyring([Key("router", digest_of(b"secret"), Role.QUERY, frozenset({"default"}))])
    assert status_of(world, call(generated))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert status_of(world, call(generated, metadata=token("guessed")))[0] is grpc.StatusCode.UNAUTHENTICATED
    answer = ask(world, call(generated, metadata=token("secret")))
    assert len(answer.matches if hasattr(answer, "matches") else answer.scores) == 3 + (call is pod_scores)
    foreign = call(generated, metadata=token("secret"), tenant="t")
    assert status_of(world, foreign)[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("/indexer.v1.IndexerService/GetPodScores", b"\xff\xff"),
        ("/indexer.v1.IndexerService/GetPodScores", b"\x12\x02\xff\xfe"),  # text that is not UTF-8
        ("/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix", b"\xff\xff"),
    ],
)
def test_what_is_no_message_is_refused_but_not_read_for_nobody(
    world: World, method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def call(channel: grpc.aio.Channel) -> Any:
        return await channel.unary_unary(method)(data)

    assert status_of(world, call)[0] is grpc.StatusCode.INVALID_ARGUMENT
    world.keyring = Keyring([Key("router", digest_of(b"secret"), Role.QUERY, None)])
    assert status_of(world, call)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert not caplog.records


def test_of_two_tokens_none_is_right(world: World, generated: Generated) -> None:
    world.keyring = Keyring([Key("router", digest_of(b"secret"), Role.QUERY, None)])
    both = (*token("guessed"), *token("secret"))
    assert status_of(world, pod_scores(generated, metadata=both))[0] is grpc.StatusCode.UNAUTHENTICATED


def token(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


def test_a_port_that_is_taken_is_said(world: World) -> None:
    async def scenario() -> None:
        first = GrpcServer(Settings(grpc_port=0), world.services)
        with pytest.raises(ListenError, match="gRPC"):
            GrpcServer(Settings(grpc_port=first.port), world.services)
        await first.close()

    asyncio.run(scenario())
