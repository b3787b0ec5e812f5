"""Who the embedded server runs as, and that only passing through is granted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from indexer.errors import StoreUnavailable
from indexer.store import account
from indexer.store.account import Account, choose_account, let_pass_through

STRANGER = Account(uid=54_321, gid=54_321)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_closed_parent_is_opened_for_passing_only(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    let_pass_through(closed / "postgres", STRANGER)
    assert mode(closed) == 0o701


def test_an_open_parent_is_left_alone(tmp_path: Path) -> None:
    readable = tmp_path / "readable"
    readable.mkdir()
    readable.chmod(0o755)
    let_pass_through(readable / "postgres", STRANGER)
    assert mode(readable) == 0o755


def test_a_user_runs_the_server_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)
    assert choose_account(tmp_path / "postgres") is None


def test_root_needs_an_account_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(account, "ACCOUNTS", ("no-such-account", "nobody"))
    chosen = choose_account(tmp_path / "postgres")
    assert chosen is not None
    assert chosen.uid != 0
    monkeypatch.setattr(account, "ACCOUNTS", ("no-such-account",))
    with pytest.raises(StoreUnavailable, match="no account no-such-account"):
        choose_account(tmp_path / "postgres")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_root_uses_the_owner_of_the_cluster(tmp_path: Path) -> None:
    cluster = tmp_path / "postgres"
    cluster.mkdir()
    with pytest.raises(StoreUnavailable, match="belongs to root"):
        choose_account(cluster)
    os.chown(cluster, STRANGER.uid, STRANGER.gid)
    assert choose_account(cluster) == STRANGER
