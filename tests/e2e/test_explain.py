"""Explanations and the journal of a service that follows a real socket, before and after it was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.service_process import Engine, ServiceProcess

TOKENS = list(range(1, 65))
PROMPT = {"model": "m", "token_ids": [*TOKENS, 65], "worker_id": "w"}


def explained(service: ServiceProcess) -> dict[str, Any]:
    status, answer = service.call("POST", "/v1/explain", PROMPT)
    assert status == 200, answer
    told: dict[str, Any] = answer["publishers"][0]
    hits = service.call("POST", "/v1/prefix-hits", {"model": "m", "token_ids": PROMPT["token_ids"]})[1]["hits"]
    assert [hit["hit_tokens"] for hit in hits] == [told["hit_tokens"]] or (not hits and not told["hit_tokens"])
    return told


def kinds_of(told: dict[str, Any]) -> list[tuple[int, str | None]]:
    return [(part["end"], part["last_event"] and part["last_event"]["kind"]) for part in told["groups"][0]["ranges"]]


def journal(service: ServiceProcess, after: str | None = None) -> dict[str, Any]:
    status, page = service.call("GET", "/v1/journal?worker_id=w" + (f"&after={after}" if after else ""))
    assert status == 200, page
    answer: dict[str, Any] = page
    return answer


def test_a_hit_and_what_ended_it_are_explained_until_the_service_dies(data_dir: Path) -> None:
    with Engine("w") as engine:
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            engine.register(service)
            engine.wait_for_subscription()
            engine.store(1, None, TOKENS[:48])
            engine.remove(3)
            engine.wait_until_applied(service)
            told = explained(service)
            assert (told["hit_tokens"], told["limited_by"]["rule"]) == (32, "missing_block")
            assert kinds_of(told) == [(32, None), (48, "removed"), (64, "never_seen")]
            assert told["first_miss"]["last_event"]["at"] > 1e9
            page = journal(service)
            assert [entry["kind"] for entry in page["entries"]] == ["stored", "removed"]
            assert (page["truncated_before"], page["is_last"]) == (None, True)
            assert service.call("GET", "/v1/audit")[1]["is_equal"]  # which flushes first
            service.process.kill()
            service.process.wait(10)
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            told = explained(service)
            assert kinds_of(told) == [(32, None), (64, "not_in_journal")]
            assert not told["journal"]["is_whole"]
            again = journal(service, page["next"])
            assert again["truncated_before"] == {"sequence_number": None, "at": None}
            assert again["entries"][0]["kind"] == "recovered"
