"""`make bench`: the figures of this machine beside what this project wants of itself.

`--peer PYTHON` runs the peer installed in that environment in the same run, and prints ratios. It listens on all
addresses, so the whole run then moves into a private network namespace, for which it has to be root.
A few minutes. docs/performance.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks import alone, churn, large, loaded, spread, steady, streaming, trace
from tests.benchmarks.processes import Neighbours
from tests.benchmarks.report import Report, format_table
from tests.benchmarks.run import QUICK, Run, Scale
from tests.benchmarks.targets import TARGETS

REPOSITORY = Path(__file__).parents[2]
DEFAULT_TRACE = REPOSITORY.parent / "shared" / "traces" / "mooncake-conversation.jsonl.gz"
IN_NAMESPACE = "KV_INDEX_BENCH_IN_NAMESPACE"
BUSY_NEIGHBOURS_CORES = 0.1

PARTS: Sequence[tuple[tuple[str, ...], Callable[[Run], None]]] = (
    (loaded.CELLS, loaded.measure),
    (streaming.CELLS, streaming.measure),
    (churn.CELLS, churn.measure),
    (spread.CELLS, spread.measure),
    (steady.CELLS, steady.measure),
    (trace.CELLS, trace.measure),
    (alone.CELLS, alone.measure),
    (large.CELLS, large.measure),
)
CELLS = tuple(dict.fromkeys(cell for cells, _ in PARTS for cell in cells))
OPTIONAL = frozenset(large.CELLS)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="the Python of an environment with the peer in it")
    parser.add_argument("--only", type=_cells, metavar="CELL,...", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--large", action="store_true", help="1,000 publishers with 10,000,000 residencies as well")
    parser.add_argument("--quick", action="store_true", help="smaller and rougher; the targets are for the full size")
    parser.add_argument("--trace", type=Path, metavar="FILE", default=DEFAULT_TRACE, help="a Mooncake trace")
    parser.add_argument("--trace-requests", type=int, default=2_000, metavar="N", help="how many of its requests")
    return parser.parse_args(arguments)


def _cells(text: str) -> frozenset[str]:
    cells = frozenset(text.split(","))
    if unknown := cells.difference(CELLS):
        raise argparse.ArgumentTypeError(f"no such cell: {', '.join(sorted(unknown))}")
    return cells


def main() -> None:
    arguments = parse()
    if arguments.peer and not os.environ.get(IN_NAMESPACE):
        enter_namespace()
    allow_many_files()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: servers are stopped on the way out
    wanted = arguments.only or frozenset(CELLS) - OPTIONAL
    run = Run(
        Report(TARGETS),
        QUICK if arguments.quick else Scale(),
        wanted | OPTIONAL if arguments.large else wanted,
        arguments.peer,
        arguments.trace if arguments.trace.exists() else None,
        arguments.trace_requests,
    )
    failed = measure(run)
    print(format_table(run.report.figures))
    print("\n".join(run.report.notes))
    if arguments.json:
        machine = {"processors": os.cpu_count(), "python": platform.python_version(), "scale": asdict(run.scale)}
        arguments.json.write_text(json.dumps(run.report.as_json() | machine, indent=2) + "\n")
    sys.exit(1 if failed else 0)


def measure(run: Run) -> list[str]:
    """All wanted parts, one after another; the names of those that failed. What they had measured until then stays."""
    failed = []
    for cells, part in PARTS:
        if not run.wants(*cells):
            continue
        name = part.__module__.rpartition(".")[2]
        print(f"measuring: {', '.join(cell for cell in cells if run.wants(cell))}", file=sys.stderr, flush=True)
        started, neighbours = time.monotonic(), Neighbours()
        try:
            part(run)
        except Exception as error:
            traceback.print_exc()
            failed.append(name)
            run.note(f"{name}: failed and is not complete: {error}")
        elapsed = time.monotonic() - started
        run.report.seconds[name] = round(elapsed, 1)
        cores = neighbours.cpu_s() / max(elapsed, 1.0)
        if cores > BUSY_NEIGHBOURS_CORES:
            run.note(f"{name}: other programs used {cores:.1f} processors meanwhile; its figures are noise in part")
    return failed


def enter_namespace() -> None:
    """Begin again in a network namespace that has nothing but `lo`; ends the program if that is not possible."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        sys.exit(
            "--peer: the peer listens on all addresses, so it is run in a private network namespace; that needs root, "
            "and the programs unshare and ip"
        )
    os.environ[IN_NAMESPACE] = "1"
    again = [sys.executable, "-m", "tests.benchmarks", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *again])


def allow_many_files() -> None:
    """Hundreds of publishers need as many sockets; servers inherit the limit, as from any service manager."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
