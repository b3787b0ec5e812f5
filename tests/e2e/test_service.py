from __future__ import annotations

import http.client
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil
import pytest

from indexer.store.embedded import EmbeddedPostgres
from tests.e2e.service_process import Engine, ServiceProcess, run_cli, wait_for

TOKENS = list(range(1, 49))
QUERY = {"model": "m", "token_ids": [*TOKENS, 49]}


def hits_of(service: ServiceProcess) -> dict[str, int]:
    status, answer = service.call("POST", "/v1/prefix-hits", QUERY)
    assert status == 200
    return {hit["worker_id"]: hit["hit_tokens"] for hit in answer["hits"]}


@pytest.fixture(scope="module")
def service(shared_data_dir: Path) -> Iterator[ServiceProcess]:
    """One for the tests that leave nothing behind."""
    with ServiceProcess(shared_data_dir) as service:
        yield service.wait_until_ready()


def test_publish_query_and_stop_leave_nothing_running(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service, Engine("http://10.0.0.7:8000") as engine:
        service.wait_until_ready()
        assert engine.register(service)[0] == 201
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS[:32])
        engine.wait_until_applied(service)
        assert hits_of(service) == {"http://10.0.0.7:8000": 32}
        assert service.call("GET", "/v1/audit")[1]["is_equal"]
        assert any("postgres" in child.name() for child in service.children)
        assert service.stop(signal.SIGTERM) == 0, service.output
        assert service.is_alone()
        assert "Traceback" not in service.output


def test_what_was_applied_survives_a_clean_stop(data_dir: Path) -> None:
    with Engine("w") as engine:
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            engine.register(service)
            engine.wait_for_subscription()
            engine.store(1, None, TOKENS[:32])
            engine.wait_until_applied(service)
            assert service.stop(signal.SIGINT) == 0, service.output
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            assert hits_of(service) == {"w": 32}
            engine.wait_for_subscription()
            engine.store(3, 2, TOKENS[32:])
            engine.wait_until_applied(service)
            assert hits_of(service) == {"w": 48}
            assert service.call("GET", "/v1/audit")[1]["is_equal"]


def test_without_a_replay_endpoint_a_restart_of_the_service_leaves_a_doubt_that_an_operator_ends(
    data_dir: Path,
) -> None:
    def trust_of(service: ServiceProcess) -> tuple[str, str]:
        publisher = service.call("GET", "/v1/publishers/w")[1]
        assert publisher["coverage_at"] is not None
        return publisher["coverage"], publisher["coverage_reason"]

    with Engine("w") as engine:
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            engine.register(service)
            engine.wait_for_subscription()
            engine.store(1, None, TOKENS[:32])
            engine.wait_until_applied(service)
            assert trust_of(service) == ("complete", "from_start")
            assert service.stop() == 0, service.output
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            engine.wait_for_subscription()
            wait_for(lambda: trust_of(service) == ("degraded", "continuity_unproven"), "the doubt")
            (hit,) = service.call("POST", "/v1/prefix-hits", QUERY)[1]["hits"]
            assert (hit["hit_tokens"], hit["coverage_reason"]) == (32, "continuity_unproven")
            assert service.call("POST", "/v1/publishers/w/resync")[1]["error"]["code"] == "no_replay_endpoint"
            assert service.call("POST", "/v1/publishers/w/clear") == (200, {"publishers": 1})
            assert hits_of(service) == {}
            assert trust_of(service) == ("since", "cleared")
            assert service.call("GET", "/v1/audit")[1]["is_equal"]
            assert service.stop() == 0, service.output


def test_a_killed_service_comes_back_with_publishers_and_answers(data_dir: Path) -> None:
    with Engine("w") as engine, ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        engine.register(service)
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS[:32])
        engine.wait_until_applied(service)
        assert service.call("GET", "/v1/audit")[1]["is_equal"]  # which flushes first
        service.process.kill()
        service.process.wait(10)
        with ServiceProcess(data_dir) as successor:
            successor.wait_until_ready()
            assert hits_of(successor) == {"w": 32}
            assert successor.call("GET", "/v1/publishers/w")[1]["sequence_number"] == 0
            engine.wait_for_subscription()
            assert successor.stop() == 0, successor.output
            assert successor.is_alone()
        assert service.is_alone()


def test_a_second_service_on_the_same_directory_is_refused(service: ServiceProcess, shared_data_dir: Path) -> None:
    result = run_cli("serve", "--port", "0", "--data-dir", str(shared_data_dir))
    assert result.returncode == 1
    assert "another service uses" in result.stderr
    assert service.call("GET", "/readyz")[0] == 200


def test_a_port_in_use_is_a_sentence_and_exit_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_cli("serve", "--port", str(port), "--data-dir", str(tmp_path / "data"))
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith(f"kv-indexer: port {port} on 127.0.0.1 is already in use")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "data").exists()


def test_a_foreign_address_is_a_sentence_and_exit_1(tmp_path: Path) -> None:
    result = run_cli("serve", "--insecure", "--host", "192.0.2.1", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert result.returncode == 1
    assert "does not belong to this machine" in result.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_an_unreachable_database_is_a_sentence_without_password_and_exit_1(command: str, tmp_path: Path) -> None:
    url = f"postgresql://me:hunter2@127.0.0.1:{free_port()}/x"
    arguments = ["--port", "0"] if command == "serve" else []
    result = run_cli(command, *arguments, "--database-url", url, "--data-dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("kv-indexer: database 'x' on 127.0.0.1")
    assert "hunter2" not in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_with_wait_an_unreachable_database_is_waited_for(tmp_path: Path) -> None:
    url = f"postgresql://me:hunter2@127.0.0.1:{free_port()}/x"
    with ServiceProcess(tmp_path, "--database-url", url, "--wait") as service:
        wait_for(lambda: "database_awaited" in service.output, "a first try")
        assert service.call("GET", "/healthz")[0] == 200
        status, answer = service.call("GET", "/readyz")
        assert (status, answer["ready"]) == (503, False)
        assert answer["missing"]
        assert service.call("POST", "/v1/prefix-hits", QUERY)[1]["error"]["code"] == "not_ready"
        assert service.stop() == 0, service.output
        assert "hunter2" not in service.output


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--port", "70000"], {}, ["port", "command line", "65535"]),
        (["--port", "http"], {}, ["port", "command line"]),
        ([], {"INDEXER_PORT": "tcp://10.0.0.1:8090"}, ["port", "INDEXER_PORT"]),
        ([], {"INDEXER_FLUSH_INTERVAL_S": "nan"}, ["flush_interval_s", "INDEXER_FLUSH_INTERVAL_S"]),
        (["--database-url", "mysql://me:hunter2@h/x"], {}, ["database_url", "postgresql://"]),
        (["--config", "/nowhere.toml"], {}, ["/nowhere.toml", "cannot be read"]),
    ],
)
def test_a_bad_setting_is_one_sentence_and_exit_2(
    arguments: list[str], environment: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    result = run_cli("serve", "--data-dir", str(tmp_path / "data"), *arguments, **environment)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
    assert "hunter2" not in result.stderr
    assert not (tmp_path / "data").exists()


def test_an_unknown_key_in_the_config_file_is_exit_2(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("prot = 8090\n")
    result = run_cli("serve", "--config", str(config))
    assert result.returncode == 2
    assert result.stderr == f"kv-indexer: unknown setting prot in {config}\n"


def test_the_fleet_starts_and_stops_with_the_service(data_dir: Path) -> None:
    with ServiceProcess(data_dir, "--simulate") as service:
        service.wait_until_ready()
        wait_for(lambda: "curl -s" in service.output, "a ready-made curl", 60)
        wait_for(lambda: len(service.note_children()) > 1, "the fleet's process")
        body = {"model": "demo", "token_ids": list(range(1000, 1097))}
        wait_for(lambda: service.call("POST", "/v1/prefix-hits", body)[1]["hits"], "a hit of the prompt in the curl")
        assert len(service.call("GET", "/v1/publishers")[1]["publishers"]) == 3
        assert service.stop(signal.SIGINT) == 0, service.output
        assert service.is_alone()
        assert "Traceback" not in service.output
        assert "Fatal" not in service.output


def test_the_fleet_does_not_outlive_a_killed_service(data_dir: Path) -> None:
    with ServiceProcess(data_dir, "--simulate") as service:
        service.wait_until_ready()

        def fleet() -> list[psutil.Process]:
            return [child for child in service.note_children() if "simulate" in child.cmdline()]

        process = wait_for(fleet, "the fleet's process")[0]
        service.process.kill()
        wait_for(lambda: not process.is_running(), "the end of the fleet")


def test_ctrl_c_in_a_terminal_reaches_the_database_only_through_the_service(data_dir: Path) -> None:
    """A terminal sends SIGINT to the whole process group; Postgres must live until the last flush."""
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        assert {os.getpgid(child.pid) for child in service.children}.isdisjoint({os.getpgid(service.process.pid)})


def test_a_worker_id_is_decoded_exactly_once(service: ServiceProcess) -> None:
    for name in ("100%25", "http://h:1/a//b/?x#y", "ü 名", "%2F"):
        with Engine(name) as engine:
            assert engine.register(service)[0] == 201
            path = f"/v1/publishers/{quote(name, safe='')}"
            assert service.call("GET", path)[1]["worker_id"] == name
            assert service.call("DELETE", path) == (200, {"removed": 1})


def connection_to(service: ServiceProcess) -> http.client.HTTPConnection:
    parts = urlsplit(service.url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)


def test_a_raw_url_as_worker_id_survives_the_server(service: ServiceProcess) -> None:
    with Engine("http://10.0.0.7:8000") as engine:
        engine.register(service)
        connection = connection_to(service)
        connection.request("GET", "/v1/publishers/http://10.0.0.7:8000?dp_rank=0")
        assert connection.getresponse().status == 200
        assert service.call("DELETE", "/v1/publishers/http://10.0.0.7:8000")[0] == 200


def test_a_refused_body_leaves_the_connection_usable(service: ServiceProcess) -> None:
    connection = connection_to(service)
    body = b" " * (33 * 1024 * 1024)
    connection.request("POST", "/v1/prefix-hits", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 413
    assert b"body_too_large" in response.read()
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200


def test_a_chunked_body_is_bounded_too(service: ServiceProcess) -> None:
    connection = connection_to(service)
    chunks = (b" " * 1024 * 1024 for _ in range(40))
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/prefix-hits", chunks, headers, encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the answer may be there all the same
    assert connection.getresponse().status == 413


def test_a_broken_request_line_is_answered_and_survived(service: ServiceProcess) -> None:
    parts = urlsplit(service.url)
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=10) as raw:
        raw.sendall(b"NONSENSE\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    assert service.call("GET", "/healthz")[0] == 200


def test_metrics_show_what_was_applied_and_counters_stay(service: ServiceProcess) -> None:
    before = service.metric("indexer_batches_applied_total")
    with Engine("measured") as engine:
        engine.register(service)
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS)
        engine.wait_until_applied(service)
        assert service.metric("indexer_batches_applied_total") == before + 1
        assert service.metric('indexer_residencies{tier="GPU"}') == 3
        assert service.metric('indexer_publisher_residencies{dp_rank="0",worker_id="measured"}') == 3
        service.call("DELETE", "/v1/publishers/measured")
    assert service.metric("indexer_batches_applied_total") == before + 1
    assert service.metric("indexer_store_reachable") == 1
    assert service.metric("indexer_ready") == 1


def test_the_command_line_asks_and_audits(service: ServiceProcess, tmp_path: Path) -> None:
    with Engine("asked") as engine:
        engine.register(service)
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS)
        engine.wait_until_applied(service)
        words = [str(token) for token in TOKENS]
        file = tmp_path / "tokens"
        file.write_text(str(TOKENS))
        for arguments, stdin in (
            (words, ""),
            ([",".join(words)], ""),
            ([], " ".join(words)),
            (["--file", str(file)], ""),
        ):
            result = run_cli("query", "m", *arguments, "--url", service.url, stdin=stdin)
            assert result.returncode == 0, result.stderr
            assert "asked" in result.stdout
            assert "GPU=48" in result.stdout
        audit = run_cli("audit", "--url", service.url)
        assert (audit.returncode, '"is_equal": true' in audit.stdout) == (0, True)
        service.call("DELETE", "/v1/publishers/asked")
    unknown = run_cli("query", "nobody", "1", "2", "--url", service.url)
    assert (unknown.returncode, "warning: " in unknown.stdout) == (0, True)


def test_the_command_line_says_what_went_wrong(service: ServiceProcess) -> None:
    wrong = run_cli("query", "m", "one", "--url", service.url)
    assert (wrong.returncode, wrong.stderr) == (
        2, "kv-indexer: token 0 is 'one'; token ids are integers from 0 on\n",
    )  # fmt: skip
    refused = run_cli("query", "m", str(2**63), "--url", service.url)
    assert refused.returncode == 1
    assert "token_ids[0]" in refused.stderr
    away = run_cli("audit", "--url", f"http://127.0.0.1:{free_port()}")
    assert (away.returncode, "cannot be reached" in away.stderr) == (1, True)


def test_migrating_and_exporting_need_no_service(data_dir: Path) -> None:
    result = run_cli("migrate", "--data-dir", str(data_dir))
    assert (result.returncode, result.stdout) == (0, "the database has the newest schema\n"), result.stderr
    result = run_cli("export-openapi")
    assert (result.returncode, '"/v1/prefix-hits"' in result.stdout) == (0, True)
    assert run_cli("--version").stdout.strip()


def test_a_stop_while_starting_is_clean(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        wait_for(lambda: service.output, "a first line")
        assert service.stop() == 0, service.output
        assert service.is_alone()


def test_a_database_that_goes_and_comes_back_is_survived(data_dir: Path) -> None:
    database = EmbeddedPostgres(data_dir)
    database.start_now()
    url = database.database_url
    try:
        with ServiceProcess(data_dir, "--database-url", url) as service, Engine("w") as engine:
            service.wait_until_ready()
            engine.register(service)
            engine.wait_for_subscription()
            database.stop_now()
            wait_for(lambda: service.call("GET", "/readyz")[0] == 503, "not ready")
            assert "database" in service.call("GET", "/readyz")[1]["missing"][0]
            engine.store(1, None, TOKENS)
            engine.wait_until_applied(service)
            assert hits_of(service) == {"w": 48}
            with Engine("x") as another:
                status, answer = another.register(service)
            assert (status, answer["error"]["code"]) == (503, "store_unavailable")
            assert service.call("GET", "/v1/audit")[0] == 503
            database.start_now()
            wait_for(lambda: service.call("GET", "/readyz")[0] == 200, "ready again")
            wait_for(lambda: service.call("GET", "/v1/audit")[1].get("is_equal"), "everything written")
            assert service.stop() == 0, service.output
    finally:
        database.stop_now()


def test_an_embedded_database_that_dies_is_started_again(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        postmaster = next(c for c in service.children if "postgres" in c.name() and c.ppid() == service.process.pid)
        postmaster.kill()
        wait_for(lambda: "database_died" in service.output, "the death noticed")
        wait_for(lambda: service.call("GET", "/v1/audit")[0] == 200, "the database again")
        wait_for(lambda: service.call("GET", "/readyz")[0] == 200, "ready again")
        assert service.stop() == 0, service.output
        assert service.is_alone()


def test_a_client_that_holds_its_connection_does_not_hold_up_the_stop(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        connection = connection_to(service)
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        started = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - started < 10
