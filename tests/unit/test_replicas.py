"""What a replica is started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from indexer.replicas import replica_environment
from indexer.settings import Settings, load_settings

URL = "postgresql://user:secret@h/db"


@pytest.mark.parametrize("media", [{}, {"NFS2": "STORAGE", "HBM": "GPU"}])
def test_a_replica_has_the_settings_of_its_parent(tmp_path: Path, media: dict[str, str]) -> None:
    settings = Settings(
        replicas=3,
        simulate=True,
        data_dir=tmp_path,
        flush_interval_s=0.5,
        log_level="debug",
        ghosts_max=7,
        media=media,
    )
    environment = replica_environment(settings, URL, 8090)
    given = load_settings(environment=environment)
    assert given == settings.model_copy(
        update={"replicas": 1, "simulate": False, "shared_port": 8090, "database_url": SecretStr(URL)}
    )


def test_what_the_parent_was_told_by_file_or_environment_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_CONFIG", "/nowhere")
    monkeypatch.setenv("INDEXER_GHOSTS_MAX", "1")
    monkeypatch.setenv("OTHER", "stays")
    environment = replica_environment(Settings(ghosts_max=7), URL, 1)
    assert "INDEXER_CONFIG" not in environment
    assert (environment["INDEXER_GHOSTS_MAX"], environment["OTHER"]) == ("7", "stays")
