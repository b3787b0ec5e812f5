"""Keys and HTTPS as an operator sets them up: by the command line, the environment and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indexer.client import IndexClient
from tests.certificates import CertificateFiles, make_certificate
from tests.e2e.service_process import ServiceProcess, run_cli, wait_for

START_S = 60.0


def new_key(name: str, role: str, *more: str) -> tuple[str, str]:
    """Token and line."""
    made = run_cli("key", "new", "--name", name, "--role", role, *more)
    assert (made.returncode, "INDEXER_API_KEYS" in made.stderr) == (0, True), made.stderr
    token, line = made.stdout.splitlines()
    assert line.startswith(f"{name}:")
    return token, line


@pytest.fixture
def certificate(tmp_path: Path) -> CertificateFiles:
    return make_certificate(tmp_path / "tls")


def client_of(service: ServiceProcess, token: str | None, certificate: CertificateFiles | None = None) -> IndexClient:
    return IndexClient(service.url, api_key=token, ca_file=certificate.authority if certificate else None)


def status_of(client: IndexClient, path: str = "/v1/stats") -> int:
    return client.call("GET", path, timeout_s=10).status


@pytest.mark.parametrize("arguments", [("serve",), ("serve", "--replicas", "2")])
def test_an_open_address_is_refused_before_anything_starts(data_dir: Path, arguments: tuple[str, ...]) -> None:
    ended = run_cli(*arguments, "--host", "0.0.0.0", "--port", "0", "--data-dir", str(data_dir / "none"))
    assert (ended.returncode, "--insecure" in ended.stderr) == (2, True), ended.stderr
    assert not (data_dir / "none").exists()


def test_wrong_keys_and_certificates_are_told_in_a_sentence(tmp_path: Path, certificate: CertificateFiles) -> None:
    tls = ("--tls-cert-file", str(certificate.cert), "--tls-key-file")
    for arguments, environment, words in [
        ((), {"INDEXER_API_KEYS": "kvi_secret"}, "bad keys in api_keys: key 1: must look like"),
        (("--api-keys-file", str(tmp_path / "none")), {}, "cannot be read"),
        ((*tls, str(certificate.authority)), {}, "no certificate and its unencrypted key"),
    ]:
        ended = run_cli("serve", "--port", "0", *arguments, **environment)
        assert ended.returncode == 2
        assert words in ended.stderr, ended.stderr
        assert "secret" not in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def test_a_key_is_made_used_and_taken_back(data_dir: Path, tmp_path: Path) -> None:
    token, line = new_key("router", "query")
    admin, admin_line = new_key("admin", "admin")
    keys = tmp_path / "keys"
    keys.write_text(f"# routers\n{line}\n")
    environment = {"INDEXER_API_KEYS": admin_line, "INDEXER_API_KEYS_FILE": str(keys)}
    with ServiceProcess(data_dir, **environment) as service:
        service.wait_until_ready()
        assert [status_of(client_of(service, t)) for t in (None, "kvi_wrong", token)] == [401, 401, 200]
        for by_environment in ({"INDEXER_TOKEN": token}, {}):
            arguments = () if by_environment else ("--token", token)
            asked = run_cli("query", "m", "1 2 3", "--json", "--url", service.url, *arguments, **by_environment)
            assert json.loads(asked.stdout)["prompt_tokens"] == 3, asked.stderr
        refused = run_cli("query", "m", "1 2 3", "--url", service.url)
        assert (refused.returncode, "answered 401" in refused.stderr) == (1, True)
        refused = run_cli("audit", "--url", service.url, INDEXER_TOKEN=token)
        assert (refused.returncode, "answered 403" in refused.stderr) == (1, True)
        assert run_cli("audit", "--url", service.url, INDEXER_TOKEN=admin).returncode == 0
        keys.write_text("")
        wait_for(lambda: status_of(client_of(service, token)) == 401, "the key was taken back")
        assert status_of(client_of(service, admin)) == 200
        assert service.stop() == 0, service.output
        assert token not in service.output
        assert line.split(":")[1] not in service.output


@pytest.mark.timeout(180)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_simulated_fleet_has_a_key_of_its_own_and_trusts_the_certificate(
    data_dir: Path, certificate: CertificateFiles, replicas: int
) -> None:
    """Its answers are as exact as without."""
    token, line = new_key("operator", "operate")
    arguments = ["--simulate", "--replicas", str(replicas)]
    arguments += ["--tls-cert-file", str(certificate.cert), "--tls-key-file", str(certificate.key)]
    with ServiceProcess(data_dir, *arguments, INDEXER_API_KEYS=line) as service:
        assert service.url.startswith("https://127.0.0.1:")
        client = client_of(service, token, certificate)

        def publishers() -> Any:
            outcome = client.call("GET", "/v1/publishers")
            return [] if outcome.failure else json.loads(outcome.body)["publishers"]

        wait_for(lambda: len(publishers()) == 3, "three engines", START_S)
        wait_for(lambda: "answers checked, all exact" in service.output, "checked answers", START_S)
        assert status_of(client_of(service, None, certificate)) == 401
        assert status_of(client_of(service, None, certificate), "/healthz") == 200
        assert service.stop() == 0, service.output
        assert "kvi_" not in service.output


def test_every_address_is_served_with_keys_or_the_word(data_dir: Path) -> None:
    token, line = new_key("router", "query")
    with ServiceProcess(data_dir, "--host", "0.0.0.0", INDEXER_API_KEYS=line) as service:
        wait_for(lambda: "plain_address_used" in service.output, "a warning")
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        wait_for(lambda: status_of(IndexClient(url, api_key=token)) == 200, "an answer", START_S)
        assert service.stop() == 0
    with ServiceProcess(data_dir, "--host", "0.0.0.0", "--insecure") as service:
        wait_for(lambda: "open_address_used" in service.output, "a warning")
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        wait_for(lambda: status_of(IndexClient(url)) == 200, "an answer", START_S)
        assert service.stop() == 0
