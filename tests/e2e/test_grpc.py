"""gRPC as its users start it: a setting, a port of its own, and a sentence where the extra is not installed."""

from __future__ import annotations

import re
from pathlib import Path

import grpc

from indexer.api.rpc import messages
from tests.e2e.service_process import Engine, ServiceProcess, run_cli, wait_for

PROMPT = list(range(100, 148))
METHOD = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix"
_PORT = re.compile(r'"?grpc_opened"?.*?"?port"?[=:] ?([0-9]+)|"port": ([0-9]+), "event": "grpc_opened"')


def test_register_store_match_stop(data_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("grpc_port = 0\n")
    with Engine("http://w:8000") as engine, ServiceProcess(data_dir, "--config", str(config)) as service:
        service.wait_until_ready()
        found = wait_for(lambda: _PORT.search(service.output), "the port of gRPC")
        assert engine.register(service)[0] == 201
        engine.wait_for_subscription()
        engine.store(1, None, PROMPT)
        engine.wait_until_applied(service)
        with grpc.insecure_channel(f"127.0.0.1:{found[1] or found[2]}") as channel:
            match = channel.unary_unary(
                METHOD,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=messages.MatchExternalKvPrefixResponse.FromString,
            )
            answer = match(messages.MatchExternalKvPrefixRequest(hashes=[1, 2, 3, 4]), timeout=30)
        assert [(m.worker_address, m.matched_prefix_blocks) for m in answer.matches] == [("http://w:8000", 3)]
        assert service.stop() == 0


def test_without_the_extra_the_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('No module named grpc')\n")
    result = run_cli("serve", "--port", "0", INDEXER_GRPC_PORT="0", PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert "pip install 'kv-indexer[grpc]'" in result.stderr
