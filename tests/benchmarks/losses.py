"""What lost frames cost: `python -m tests.benchmarks.losses`. Prints the table of docs/losses.md; takes five minutes.

All captures, without replay. Recall: tokens answered of those that the engines' own answers have; too high: the share
of answers above the engine's.
"""

from __future__ import annotations

import sys

from tests.conformance.lossy import LossyPlayer, Policy, Tally
from tests.conformance.player import captures

LOSSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
SEEDS = 3
GROUPS = {"dense": ("dense", "long", "many-workers", "sglang"), "hybrid": ()}
"""By the names of captures: engines with one group of full attention, and all others."""


def is_dense(name: str) -> bool:
    return any(word in name for word in GROUPS["dense"])


def measure(policy: Policy, loss: float) -> dict[str, Tally]:
    tallies = {group: Tally() for group in GROUPS}
    for path in captures():
        for seed in range(SEEDS if loss else 1):
            player = LossyPlayer(path, loss=loss, seed=seed, policy=policy)
            player.play()
            tallies["dense" if is_dense(path.name) else "hybrid"].add(player.tally)
    return tallies


def row(policy: Policy, loss: float) -> str:
    tallies = measure(policy, loss)
    total = Tally()
    cells = [policy.value, f"{loss:.1%}"]
    for tally in tallies.values():
        total.add(tally)
        cells.append(f"{tally.recall:.1%}")
    known = total.too_high_though_known / total.answers
    cells += [f"{total.share_too_high:.2%}", f"{known:.2%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    sys.stdout.write(
        "| before a gap | frames lost | recall, dense | recall, hybrid | too high | too high, loss known |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    for policy in Policy:
        for loss in LOSSES:
            sys.stdout.write(row(policy, loss) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
