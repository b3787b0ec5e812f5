"""Under which account the embedded server runs, and how it gets to its files.

PostgreSQL refuses to run as root. When the service is root (a container, a CI machine), the server runs as an account
that exists: nothing is added to the system. It must be able to walk to its data and its binaries, so others are let
pass through their parent directories, but not list them.
"""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

import structlog

from indexer.errors import StoreUnavailable

log = structlog.get_logger()

ACCOUNTS = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    uid: int
    gid: int


def choose_account(cluster: Path) -> Account | None:
    """None: the one we run as. As root: the owner of the cluster, or the first of ACCOUNTS that exists."""
    if os.geteuid() != 0:
        return None
    if cluster.exists():
        owner = cluster.stat()
        if owner.st_uid == 0:
            raise StoreUnavailable(
                f"{cluster} belongs to root, as whom PostgreSQL does not run: give it to another user"
            )
        return Account(owner.st_uid, owner.st_gid)
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise StoreUnavailable(f"PostgreSQL does not run as root, and there is no account {' or '.join(ACCOUNTS)}")


def let_pass_through(path: Path, account: Account) -> None:
    """Let `account` reach `path`: others may pass through its parents. Says so for each directory it changes."""
    for directory in path.resolve().parents:
        status = directory.stat()
        passes = stat.S_IXUSR if status.st_uid == account.uid else stat.S_IXOTH
        if status.st_mode & passes:
            continue
        try:
            directory.chmod(stat.S_IMODE(status.st_mode) | passes)
        except OSError as error:
            raise StoreUnavailable(
                f"the database's account cannot pass through {directory}: {error.strerror}"
            ) from error
        log.warning("directory_opened", path=str(directory), reason="the database's account must pass through it")


def make_private(directory: Path, account: Account | None) -> None:
    """Make a directory that only the server's account may enter."""
    directory.mkdir(mode=0o700)
    if account is not None:
        os.chown(directory, account.uid, account.gid)
