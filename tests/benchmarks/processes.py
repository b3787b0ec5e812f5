"""What processes cost, as Linux tells it: processor seconds and resident bytes of a server and all that it started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPU_FIELDS = 8  # of /proc/stat: user nice system idle iowait irq softirq steal


class ProcessTree:
    """A process and its descendants, without the database (all of `postgres`), which is told apart."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        return sum(_cpu_s(pid) for pid in self._pids()[0])

    def database_cpu_s(self) -> float:
        return sum(_cpu_s(pid) for pid in self._pids()[1])

    def resident_bytes(self) -> int:
        return sum(_status_bytes(pid, "VmRSS") for pid in self._pids()[0])

    def database_bytes(self) -> int:
        """Without the buffers that its processes share."""
        return sum(_status_bytes(pid, "RssAnon") for pid in self._pids()[1])

    def main_thread_waited_s(self) -> float:
        """How long the first thread of the first process was ready to run but got no processor, so far."""
        return _waited_s(Path(f"/proc/{self._pid}/task/{self._pid}/schedstat"))

    def _pids(self) -> tuple[list[int], list[int]]:
        """(of the server, of the database)."""
        own: list[int] = []
        database: list[int] = []
        for process in _family(self._pid):
            try:
                (database if process.name().startswith("postgres") else own).append(process.pid)
            except psutil.NoSuchProcess:
                continue
        return own, database


class Neighbours:
    """How busy the rest of the machine was while we measured: processor seconds that none of our processes used."""

    def __init__(self) -> None:
        self._started = self._elsewhere_s()

    def cpu_s(self) -> float:
        """Since this object was made."""
        return max(0.0, self._elsewhere_s() - self._started)

    def _elsewhere_s(self) -> float:
        ours = sum(_cpu_s(process.pid, with_ended_children=True) for process in _family(os.getpid()))
        return _machine_busy_s() - ours


def own_thread_waited_s() -> float:
    """The same of the calling thread."""
    return _waited_s(Path("/proc/thread-self/schedstat"))


def _waited_s(schedstat: Path) -> float:
    """The second number, in nanoseconds; 0 where the kernel does not tell."""
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _family(pid: int) -> Iterable[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_s(pid: int, with_ended_children: bool = False) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    ticks = fields[11:15] if with_ended_children else fields[11:13]
    return sum(map(int, ticks)) / TICKS_PER_S


def _machine_busy_s() -> float:
    """User, nice, system and interrupt time of all processors."""
    ticks = list(map(int, Path("/proc/stat").read_text().split(maxsplit=_CPU_FIELDS + 1)[1 : _CPU_FIELDS + 1]))
    return (sum(ticks) - ticks[3] - ticks[4] - ticks[7]) / TICKS_PER_S


def _status_bytes(pid: int, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))
