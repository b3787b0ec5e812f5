"""How many rows changes are."""

from __future__ import annotations

from indexer.index.state import Checkpoint, GhostRow, HolderChanges, HolderKey, PublisherChanges, ResidencyRow
from indexer.registration import PublisherKey
from tests.residency_columns import changes_of

GPU = HolderKey("GPU", 0, "")


def test_the_size_of_changes_counts_rows_columns_clears_and_ghosts() -> None:
    columns = changes_of(removed=[1, 2], upserted={2: ResidencyRow(5, None, 6, 16, 0, 1)}, counted={3: 4})
    changes = PublisherChanges(
        publisher=PublisherKey("http://worker", 0),
        publisher_id=1,
        checkpoint=Checkpoint(),
        granule=16,
        holders=[HolderChanges(GPU, True, {b"wide": None}, columns), HolderChanges(GPU)],
        ghosts_cleared=False,
        ghosts={9: GhostRow(1, 1, 1)},
        expired=None,
        groups=None,
        side_state=None,
    )
    assert [holder.size for holder in changes.holders] == [6, 0]
    assert changes.size == 7
