"""Who gets in: the keys and the certificate of a service, read at start, and again when their files change.

If broken: a key that was taken back would go on opening, or nobody would get in any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from indexer.api.access import Keyring
from indexer.errors import SettingsError
from indexer.keys import configured_keys
from indexer.listening import is_loopback
from indexer.metrics import Metrics
from indexer.settings import Settings
from indexer.tls import configured_certificate

log = structlog.get_logger(__name__)

LOOK_INTERVAL_S = 1.0


class Guard:
    """Raises SettingsError where keys or certificate cannot be used, or what would be open to everybody is not said to
    be meant so. `watch` keeps both up to date; what is wrong with a changed file is logged and counted, and what held
    before stays."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._watched = [_Watched(settings.api_keys_file), _Watched(settings.tls_cert_file, settings.tls_key_file)]
        keys = configured_keys(settings)
        self.keyring = None if keys is None else Keyring(keys)
        self._certificate = configured_certificate(settings)
        self.tls = None if self._certificate is None else self._certificate.context
        self._warnings = self._look_at_address()

    def _look_at_address(self) -> Sequence[tuple[str, str]]:
        host = self._settings.host
        if is_loopback(host):
            return ()
        if self.keyring is None and not self._settings.insecure:
            raise SettingsError(
                "insecure",
                f"whoever reaches the address {host} could read and change everything: configure api_keys or"
                " api_keys_file (`kv-indexer key new` makes a key), listen on 127.0.0.1, or say --insecure"
                " (INDEXER_INSECURE=true)",
            )
        if self.keyring is None:
            return (("open_address_used", "anyone who can reach this address can use the API"),)
        if self.tls is None:
            return (("plain_address_used", "tokens cross the network as they are: set tls_cert_file and tls_key_file"),)
        return ()

    def warn(self, url: str) -> None:
        for event, advice in self._warnings:
            log.warning(event, url=url, advice=advice)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for watched, reread in zip(self._watched, (self._reread_keys, self._reread_certificate), strict=True):
                if watched.has_changed():
                    self._reread(watched.names, reread)

    def _reread(self, names: Sequence[str], reread: Callable[[], None]) -> None:
        try:
            reread()
            log.info("access_files_reread", files=names)
        except SettingsError as error:
            log.error("access_files_refused", files=names, reason=str(error))
            self._metrics.access_files_refused.inc()

    def _reread_keys(self) -> None:
        keys = configured_keys(self._settings)
        assert keys is not None
        assert self.keyring is not None
        self.keyring.replace(keys)

    def _reread_certificate(self) -> None:
        assert self._certificate is not None
        self._certificate.reload()


class _Watched:
    """Files that are read together, if there are any."""

    def __init__(self, *paths: Path | None) -> None:
        self._paths = [path for path in paths if path is not None]
        self.names = list(map(str, self._paths))
        self._seen = self._look()

    def has_changed(self) -> bool:
        seen, self._seen = self._seen, self._look()
        return self._seen != seen

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None for one that is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
