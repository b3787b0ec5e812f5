"""What is sent; and that mistakes of the caller are told at once, before anything is sent."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from indexer.client import AsyncIndexClient, IndexClient, MultimodalItem, local_hashes
from indexer.client.prompts import pack_hashes, pack_tokens
from indexer.client.requests import prefix_hits, register, unregister

URL = "http://127.0.0.1:1"
TOKENS = [1, 2, 2**32 - 1]
PACKED = array("I", TOKENS).tobytes()


def body(*arguments: Any, **options: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(prefix_hits(*arguments, **options).body)
    return decoded


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        PACKED,
        bytearray(PACKED),
        array("I", TOKENS),
        array("q", TOKENS),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.int64),
        np.repeat(np.array(TOKENS, np.uint32), 2)[::2],
        memoryview(PACKED),
    ],
)
def test_tokens_in_any_usual_form_are_packed(tokens: Any) -> None:
    assert pack_tokens(tokens) == PACKED
    assert body("m", tokens, None, None) == {"model": "m", "token_ids": PACKED}


def test_wide_tokens_travel_as_integers() -> None:
    assert body("m", [1, 2**40], None, None) == {"model": "m", "token_ids": [1, 2**40]}


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, -1], ValueError),
        ([2**63], ValueError),
        (b"\0\0\0", ValueError),
        (np.array([-1], np.int32), ValueError),
        ("1 2", TypeError),
        ([1.5], TypeError),
        ([[1, 2]], TypeError),
        (7, TypeError),
        (np.array([[1]], np.uint32), TypeError),
        (np.array([1.0]), TypeError),
        (None, TypeError),
    ],
)
def test_what_are_no_tokens_is_told_at_once(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error), IndexClient(URL) as client:
        client.prefix_hits("m", tokens)


def test_only_what_is_said_is_sent() -> None:
    sent = body(
        "m",
        TOKENS,
        None,
        None,
        tenant="t",
        lora_name="l",
        cache_salt="s",
        multimodal=[MultimodalItem("i", 1, 2), ("j", 3, 4)],
        workers=("w",),
        detail=True,
        expected=True,
    )
    assert sent == {
        "model": "m",
        "token_ids": PACKED,
        "lora_name": "l",
        "cache_salt": "s",
        "multimodal": [{"identifier": "i", "offset": 1, "length": 2}, {"identifier": "j", "offset": 3, "length": 4}],
        "tenant": "t",
        "workers": ["w"],
        "detail": True,
        "expected": True,
    }


def test_with_a_granule_only_hashes_travel() -> None:
    tokens = list(range(1, 41))
    items = [MultimodalItem("img-a", 20, 3)]
    sent = body("m", tokens, None, 16, lora_name="my-lora", cache_salt="s", multimodal=items)
    hashes = local_hashes(tokens, 16, lora_name="my-lora", cache_salt="s", multimodal=items)
    assert sent == {"model": "m", "local_hashes": hashes, "granule": 16}
    assert len(hashes) == 16


def test_hashes_are_those_of_the_public_rule() -> None:
    tokens = array("I", range(1, 33))
    expected = [xxhash.xxh3_64_intdigest(tokens[at : at + 16].tobytes(), 1337) for at in (0, 16)]
    assert local_hashes(tokens, 16) == array("Q", expected).tobytes()
    assert expected == [16863443419780771464, 2287610619914608821]
    assert pack_hashes(expected) == pack_hashes(np.array(expected, np.uint64)) == local_hashes(tokens, 16)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.prefix_hits("m"), TypeError),
        (lambda client: client.prefix_hits("m", [1], local_hashes=[1]), TypeError),
        (lambda client: client.prefix_hits("m", local_hashes=[1], lora_name="l"), TypeError),
        (lambda client: client.prefix_hits("m", local_hashes=[-1]), ValueError),
        (lambda client: client.prefix_hits("m", local_hashes=b"1234"), ValueError),
        (lambda client: client.prefix_hits("m", [1], granule=0), ValueError),
        (lambda client: client.prefix_hits("m", [1], salt="s"), TypeError),
        (lambda client: client.prefix_hits(None, [1]), TypeError),
        (lambda client: client.prefix_hits("m", [1], tenant=7), TypeError),
        (lambda client: client.prefix_hits("m", [1], workers="w"), TypeError),
        (lambda client: client.register("w", "m", "tcp://h:1", rank=1), TypeError),
        (lambda client: client.register(7, "m", "tcp://h:1"), TypeError),
        (lambda client: client.call("GET", "readyz"), ValueError),
        (lambda client: client.call("GET", "/a b"), ValueError),
        (lambda client: client.call("GET / HTTP/1.1\r\nx:", "/"), ValueError),
        (lambda client: client.call("POST", "/", object()), TypeError),
    ],
)
def test_a_mistake_raises_before_anything_is_sent(
    call: Callable[[IndexClient], object], error: type[Exception]
) -> None:
    with IndexClient(URL) as client:
        with pytest.raises(error):
            call(client)
        assert client.counts().no_signal == {}


@pytest.mark.parametrize("client", [IndexClient, AsyncIndexClient])
@pytest.mark.parametrize(
    ("urls", "settings"),
    [
        ([], {}),
        ("127.0.0.1:8090", {}),
        ("ftp://h", {}),
        ("http://", {}),
        ("http://h/?q", {}),
        ("http://me:secret@h", {}),
        ("http://h\r\nx: y", {}),
        ("http://h:99999", {}),
        ([URL, URL], {}),
        (URL, {"deadline_s": 0}),
        (URL, {"granule": 0}),
        (URL, {"api_key": "a\r\nb"}),
    ],
)
def test_settings_that_cannot_be_are_refused(client: Any, urls: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        client(urls, **settings)


def test_a_file_of_certificates_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        IndexClient("https://h", ca_file=tmp_path / "none")


def test_registrations_say_only_what_is_said() -> None:
    request = register("w", "m", "tcp://h:1", dp_rank=0, replay_endpoint=None, options={"eagle": True})
    assert (request.method, request.target, request.content_type) == ("POST", "/v1/publishers", "application/json")
    assert msgspec.json.decode(request.body) == {
        "worker_id": "w", "model": "m", "endpoint": "tcp://h:1", "dp_rank": 0, "options": {"eagle": True},
    }  # fmt: skip
    assert unregister("http://h:1/a?b", None).target == "/v1/publishers/http%3A%2F%2Fh%3A1%2Fa%3Fb"
    assert unregister("w", 3).target == "/v1/publishers/w?dp_rank=3"
