"""Explanations and the journal of a service that follows a real socket, before and after it was killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.e2e.service_process import Engine, ServiceProcess

TOKENS = list(range(1, 65))
PROMPT = {"model": "m", "token_ids": [*TOKENS, 65], "worker_id": "w"}


def explained(service: ServiceProcess, **more: Any) -> dict[str, Any]:
    status, answer = service.call("POST", "/v1/explain", PROMPT | more)
    assert status == 200, answer
    told: dict[str, Any] = answer["publishers"][0]
    return told


def hits_of(service: ServiceProcess) -> list[int]:
    query = {"model": "m", "token_ids": PROMPT["token_ids"]}
    return [hit["hit_tokens"] for hit in service.call("POST", "/v1/prefix-hits", query)[1]["hits"]]


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
            assert hits_of(service) == [32]
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


def test_past_answers_are_given_also_after_the_service_was_killed(data_dir: Path) -> None:
    config = data_dir.parent / f"{data_dir.name}.toml"
    config.write_text("journal_rows_s = 3600\n")
    try:
        with Engine("w") as engine:
            with ServiceProcess(data_dir, "--config", str(config)) as service:
                service.wait_until_ready()
                began = time.time()
                engine.register(service)
                engine.wait_for_subscription()
                times = []
                for change in (lambda: engine.store(1, None, TOKENS[:48]), lambda: engine.remove(2), engine.clear):
                    change()
                    engine.wait_until_applied(service)
                    assert service.call("GET", "/v1/audit")[1]["is_equal"]  # which flushes first
                    times.append(time.time())
                assert past_hits(service, times) == [48, 16, 0]
                service.process.kill()
                service.process.wait(10)
            with ServiceProcess(data_dir, "--config", str(config)) as service:
                service.wait_until_ready()
                assert past_hits(service, times) == [48, 16, 0]
                status, answer = service.call("POST", "/v1/explain", PROMPT | {"as_of": began - 3600})
                assert (status, answer["error"]["code"]) == (422, "as_of_out_of_reach")
                assert service.call("DELETE", "/v1/publishers/w")[0] == 200
                assert past_hits(service, times) == [48, 16, 0]
                gone = service.call("POST", "/v1/explain", PROMPT | {"as_of": time.time()})
                assert (gone[0], gone[1]["error"]["code"]) == (404, "unknown_publisher")
    finally:
        config.unlink()


def past_hits(service: ServiceProcess, times: list[float]) -> list[int]:
    return [explained(service, as_of=at)["hit_tokens"] for at in times]
