"""The bytes are those of real engines: payloads recorded from them, rebuilt from what they say."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from indexer.simulate import encode
from indexer.simulate.cache import Cleared, Mutation, Prompt, Removed, Stored
from indexer.simulate.pool import GroupSpec
from indexer.simulate.tree import SglangCache

ADAPTERS = {"adapter-a": 1, "adapter-b": 2}
HYBRID = (GroupSpec(), GroupSpec(window_tokens=64))

# vLLM 0.33, full attention and a window of 64: two removes; the same block removed and stored in both groups.
VLLM_REMOVED = (
    "k8tB2sMRrzA8f5KEpHR5cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HPdXEkNI0qZJymbWVkaXVto0dQValncm91cF9pZHgBhKR0eXBlrE"
    "Jsb2NrUmVtb3ZlZKxibG9ja19oYXNoZXORz48zLxH+tuUypm1lZGl1baNHUFWpZ3JvdXBfaWR4AQA="
)
VLLM_STORED = (
    "k8tB2sMRrzaa9pLeAAukdHlwZatCbG9ja1N0b3JlZKxibG9ja19oYXNoZXORz8YVryd9xR57sXBhcmVudF9ibG9ja19oYXNoz5xP2IXoDHfCqX"
    "Rva2VuX2lkc9wAEM0CZs0Irs0FTM0Jqc0DYMyezQlrb80Kxc0HZM0DJ0RFzQajzQPbzOyqYmxvY2tfc2l6ZRCnbG9yYV9pZMCmbWVkaXVto0dQ"
    "Valsb3JhX25hbWXAqmV4dHJhX2tleXORwKlncm91cF9pZHgAsmt2X2NhY2hlX3NwZWNfa2luZK5mdWxsX2F0dGVudGlvbt4ADKR0eXBlq0Jsb2"
    "NrU3RvcmVkrGJsb2NrX2hhc2hlc5HPxhWvJ33FHnuxcGFyZW50X2Jsb2NrX2hhc2jPnE/YhegMd8KpdG9rZW5faWRz3AAQzQJmzQiuzQVMzQmp"
    "zQNgzJ7NCWtvzQrFzQdkzQMnREXNBqPNA9vM7KpibG9ja19zaXplEKdsb3JhX2lkwKZtZWRpdW2jR1BVqWxvcmFfbmFtZcCqZXh0cmFfa2V5c5"
    "HAqWdyb3VwX2lkeAGya3ZfY2FjaGVfc3BlY19raW5krnNsaWRpbmdfd2luZG93vGt2X2NhY2hlX3NwZWNfc2xpZGluZ193aW5kb3dAAA=="
)
# vLLM 0.33: with an adapter and a session; the first block of a salted prompt, after a remove.
VLLM_ADAPTER = (
    "k8tB2sMRnlQLrZHeAAykdHlwZatCbG9ja1N0b3JlZKxibG9ja19oYXNoZXORz40mLmaytuAdsXBhcmVudF9ibG9ja19oYXNoz4AlZnuz3m/xqX"
    "Rva2VuX2lkc9wAEM0Gr1vNB63NBdbMrc0GNc0CLs0FL80JG80IBc0CAM0HGM0Hps0D4s0KLc0EGKpibG9ja19zaXplEKdsb3JhX2lkAaZtZWRp"
    "dW2jR1BVqWxvcmFfbmFtZalhZGFwdGVyLWGqZXh0cmFfa2V5c5GRqWFkYXB0ZXItYalncm91cF9pZHgAsmt2X2NhY2hlX3NwZWNfa2luZK5mdW"
    "xsX2F0dGVudGlvbqpzZXNzaW9uX2lkpnNlc3MtMgA="
)
VLLM_SALTED = (
    "k8tB2sMRnlzyUJKEpHR5cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HP3GVOlYNkzaKmbWVkaXVto0dQValncm91cF9pZHgA3gALpHR5cG"
    "WrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzkc+Qlqpahkb9d7FwYXJlbnRfYmxvY2tfaGFzaMCpdG9rZW5faWRz3AAQzQPvzQIzzQidzQOdzQG8"
    "zQIyzQNUzQcCzQUPzQZxzQPizQbyzQc+zQIyzQZRzQclqmJsb2NrX3NpemUQp2xvcmFfaWTApm1lZGl1baNHUFWpbG9yYV9uYW1lwKpleHRyYV"
    "9rZXlzkZGodGVuYW50LTKpZ3JvdXBfaWR4ALJrdl9jYWNoZV9zcGVjX2tpbmSuZnVsbF9hdHRlbnRpb24A"
)
# vLLM 0.23: a remove and a store with an adapter, and a store without a parent.
ARRAYS = (
    "k8tB2sMSYmKNepKUrEJsb2NrUmVtb3ZlZJHEIKFfcRdorjoHFW1N5QYAm5MiSMKP1P9jSaDfYNzf4t8so0dQVQCcq0Jsb2NrU3RvcmVkkcQgva"
    "do98Sf8NhL/t5bztvZ4lO5Ot3cOThq+qJPEuAfgKbEIKfdwhPrNpGuT3QyybOuDjzIlXJhoV+rnC8J+PuIKCPi3AAQzQgLzQXnzQPwzQgszQWg"
    "UM0BAs0JmMyczQFIzQWQzQS+zNrNCqDNBFHNAgoQAaNHUFWpYWRhcHRlci1hkZGpYWRhcHRlci1hAK5mdWxsX2F0dGVudGlvbsAA"
)
# SGLang 0.5.23: the first batch, a remove, and stores: plain, with adapter and session, with salt and adapter.
SGLANG = (
    "k8tB2sMXLAxgapGBpHR5cGWwQWxsQmxvY2tzQ2xlYXJlZAA=",
    "k8tB2sMXLCL/dZGDpHR5cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HPAcgQHdnS9QGmbWVkaXVto0dQVQA=",
    (
        "k8tB2sMXLIugfJGHpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzkc8QlZQa8lHAqbFwYXJlbnRfYmxvY2tfaGFzaM82p1aJk+reNKl0b2"
        "tlbl9pZHPcABDNBZPNB2HNB5vNA53NCwnNBxPNB0fNCE/NAhXNA2TNATfNAcQWzQY9zQoUE6pibG9ja19zaXplEKdsb3JhX2lkwKZtZWRpdW2j"
        "R1BVAA=="
    ),
    (
        "k8tB2sMXLBjYLJGJpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzks9QQWGFMwnPKNPkdDYCkvTl5LFwYXJlbnRfYmxvY2tfaGFzaNPTUL"
        "rse13oyql0b2tlbl9pZHPcACDNBMrNCeTNBOvNBKFyzLrNB1DNCX/NBzfNArnNAuzNAs7NBObNCn7NAY/NCKLNASHNCBDNAVfNCirNAjPNA3vN"
        "BMDNBtXNCTLNBEHNCu/NB0rMqs0FKs0CdM0I9qpibG9ja19zaXplEKdsb3JhX2lkwKZtZWRpdW2jR1BVqnNlc3Npb25faWSmc2Vzcy0yqWxvcm"
        "FfbmFtZalhZGFwdGVyLWIA"
    ),
    (
        "k8tB2sMXLIq/vJGJpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzkdOgALF3jqG7HLFwYXJlbnRfYmxvY2tfaGFzaM9ddg8JrLl1Fal0b2"
        "tlbl9pZHPcABDNBAjNAl7NA/XNBLjMzc0Kbc0DGc0Ek80KI80JRs0G2M0KE80Ctc0GJ80Hf80IlKpibG9ja19zaXplEKdsb3JhX2lkwKZtZWRp"
        "dW2jR1BVqmNhY2hlX3NhbHSodGVuYW50LTGpbG9yYV9uYW1lqWFkYXB0ZXItYgA="
    ),
)


def as_dict(event: dict[str, Any] | list[Any]) -> dict[str, Any]:
    """A recorded event by field names."""
    if isinstance(event, dict):
        return event
    struct = encode.ArrayStored if event[0] == "BlockStored" else encode.ArrayRemoved
    return {"type": event[0], **dict(zip(struct.__struct_fields__, event[1:], strict=True))}


def digest_of(wire_hash: int | bytes | None) -> bytes | None:
    """A digest with this hash on the wire, in each of the three forms."""
    if wire_hash is None or isinstance(wire_hash, bytes):
        return wire_hash
    bits = (wire_hash % 2**64).to_bytes(8, "big")
    return bits + bytes(16) + bits


def mutation_of(event: dict[str, Any]) -> Mutation:
    """What a cache must have done to publish this event."""
    if event["type"] == "AllBlocksCleared":
        return Cleared()
    digests = tuple(digest for digest in map(digest_of, event["block_hashes"]) if digest is not None)
    if event["type"] == "BlockRemoved":
        return Removed(event.get("group_idx", 0), digests)
    keys = event.get("extra_keys") or [None] * len(digests)
    return Stored(
        event.get("group_idx", 0),
        digests,
        digest_of(event["parent_block_hash"]),
        tuple(event["token_ids"]),
        tuple(None if some is None else tuple(some) for some in keys),
        Prompt((), event.get("lora_name"), event.get("cache_salt"), session_id=event.get("session_id")),
    )


def rebuilt(payload: bytes, encode_mutation: encode.EncodeMutation) -> bytes:
    timestamp, events, dp_rank = msgspec.msgpack.decode(payload)
    mutations = [mutation_of(as_dict(event)) for event in events]
    return encode.encode_batch(timestamp, [encode_mutation(mutation) for mutation in mutations], dp_rank)


@pytest.mark.parametrize(
    ("recorded", "groups"),
    [
        (VLLM_REMOVED, HYBRID),
        (VLLM_STORED, HYBRID),
        (VLLM_ADAPTER, HYBRID[:1]),
        (VLLM_SALTED, HYBRID[:1]),
    ],
)
def test_vllm_maps_are_byte_for_byte_those_of_vllm(recorded: str, groups: Sequence[GroupSpec]) -> None:
    payload = base64.b64decode(recorded)
    assert rebuilt(payload, encode.vllm_maps(16, groups, ADAPTERS)) == payload


def test_vllm_arrays_are_byte_for_byte_those_of_vllm_0_23() -> None:
    payload = base64.b64decode(ARRAYS)
    assert rebuilt(payload, encode.vllm_arrays(16, HYBRID[:1], ADAPTERS)) == payload


@pytest.mark.parametrize("recorded", SGLANG)
def test_sglang_maps_are_byte_for_byte_those_of_sglang(recorded: str) -> None:
    payload = base64.b64decode(recorded)
    assert rebuilt(payload, encode.sglang_maps(16)) == payload


def test_a_clear_of_vllm_0_23_is_an_array_of_its_name() -> None:
    event = encode.vllm_arrays(16, HYBRID[:1], {})(Cleared())
    assert msgspec.msgpack.decode(encode.encode_batch(1.0, [event])) == [1.0, [["AllBlocksCleared"]], 0]


def test_hashes_are_the_unsigned_last_and_the_signed_first_eight_bytes() -> None:
    digest = b"\xff" + bytes(22) + b"\xff" + bytes(8)
    assert encode.signed_hash(digest) == -(2**56)
    assert encode.unsigned_hash(digest[:24] + b"\x80" + bytes(7)) == 2**63


PLAIN_TOKENS = (
    *(2060, 2672, 1522, 2976, 1844, 1637, 236, 308, 469, 1514, 1310, 1597, 2161, 948, 932, 1876),
    *(2143, 1642, 1632, 126, 2599, 340, 2577, 1331, 2580, 2865, 1960, 829, 1232, 2270, 885, 206),
)
SALTED_TOKENS = (
    *(2871, 1840, 2572, 2029, 1299, 212, 535, 1773, 818, 851, 1644, 1328, 115, 1053, 1675, 417),
    *(2827, 1463, 1280, 1675, 2479, 2130, 1662, 1060, 769, 2738, 1855, 2224, 2854, 725, 2624, 2374),
)


@pytest.mark.parametrize(
    ("prompt", "hashes"),
    [
        (Prompt(PLAIN_TOKENS), [-8258501884818387676, -2238512547878013080]),
        (Prompt(SALTED_TOKENS, cache_salt="tenant-2"), [6020497837248529254, -5991947705609458393]),
    ],
)
def test_sglang_hashes_are_those_of_sglang(prompt: Prompt, hashes: list[int]) -> None:
    cache = SglangCache(pages=4, page_size=16, adapter_seed=b"")
    cache.admit(prompt)
    stored = cache.take_mutations()[-1]
    assert isinstance(stored, Stored)
    assert [encode.signed_hash(digest) for digest in stored.digests] == hashes
