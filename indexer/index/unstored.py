"""What of a publisher the store does not have yet.

Purpose: changes of holders, ghosts, groups and side state are taken all at once, with the checkpoint they belong to,
and come back if the flush failed.

Invariants: what was taken is in no later changes, unless it was restored; what is restored goes under what is newer.

If broken: rows would miss effects of batches that the stored checkpoint is past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from indexer.index.columns import PublisherState
from indexer.index.groups import Groups
from indexer.index.residents import Residents
from indexer.index.side_state import SideState
from indexer.index.state import Checkpoint, PublisherChanges
from indexer.registration import Registration

if TYPE_CHECKING:
    from indexer.index.ghosts import GhostChanges


class Unstored:
    def __init__(self, registration: Registration, residents: Residents, groups: Groups, side_state: SideState) -> None:
        self._registration = registration
        self._residents = residents
        self._groups = groups
        self._side_state = side_state
        self._groups_stored = 0

    @property
    def pending(self) -> int:
        """Rows that the next flush would write."""
        holders = sum(holder.changes_pending for holder in self._residents.holders.values())
        is_expired = self._residents.unverified.expired is not None
        return holders + self._residents.ghosts.changes_pending + is_expired

    def take(self, checkpoint: Checkpoint, granule: int | None) -> PublisherChanges:
        """Cost: per change."""
        taken = [holder.take_changes() for holder in self._residents.holders.values()]
        ghosts_cleared, ghosts = self._residents.ghosts.take_changes()
        changes = PublisherChanges(
            publisher=self._registration.key,
            publisher_id=self._registration.publisher_id,
            checkpoint=checkpoint,
            granule=granule,
            holders=[h for h in taken if h is not None],
            ghosts_cleared=ghosts_cleared,
            ghosts=ghosts,
            expired=self._residents.unverified.take_expired(),
            groups=self._groups.states() if self._groups_stored != self._groups.version else None,
            side_state=self._side_state.encode() if self._side_state.is_changed else None,
        )
        self.note_groups_stored()
        self._side_state.set_changed(False)
        return changes

    def take_everything(self, checkpoint: Checkpoint, granule: int | None) -> PublisherState:
        """Changes as ever, with all that is no row, and a copy of what is held. Cost: 0.2 us a residency."""
        self._groups_stored = -1
        self._side_state.set_changed(True)
        changes = self.take(checkpoint, granule)
        return PublisherState(changes, self._residents.copy(), self._residents.ghosts.copy())

    def restore(self, changes: PublisherChanges) -> None:
        for holder_changes in changes.holders:
            self._residents.holder(holder_changes.holder).restore_changes(holder_changes)
        self._residents.unverified.restore_expired(changes.expired)
        self._residents.ghosts.restore_changes(changes.ghosts_cleared, cast("GhostChanges", changes.ghosts))
        if changes.groups is not None:
            self._groups_stored = -1
        if changes.side_state is not None:
            self._side_state.set_changed(True)

    def note_groups_stored(self) -> None:
        """The store has them as they are."""
        self._groups_stored = self._groups.version
