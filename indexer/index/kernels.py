"""The loops of the index over flat arrays: tables, holder sets, whole batches of events, whole prompts.

A table maps 64-bit keys to 64-bit values by open addressing: slot i is `slots[2i]` (key) and `slots[2i + 1]` (value);
value 0 is an empty slot, so 0 is never stored. Where a key belongs, its home, grows with its mixed bits, and probes go
up from there: behind the last home are as many slots as there may be entries, so no probe comes to an end of the array.
A table of another capacity has its entries in the same order. So it changes its capacity in place, a few slots per
change: it grows from back to front, as all move up, and shrinks from front to back. While that lasts, keys on one side
of the cursor belong where they did before, those on the other side where they will (`_capacity_at`).

A key space is a table content key -> `end of the prefix in granules << 32 | set id`; a holder is a table engine hash
-> content key; steps from set to set are a table of their own (see `_step_key`).

Functions that change something say in a status what they need first: room, or a step that was never made. They have
changed nothing by then that they would not find again, so they are simply called again. Keys, hashes and values are
unsigned 64-bit, positions and counts signed; mixing the two would make floats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from indexer.compiled import kernel
from indexer.identity.chain_kernels import chain, hash_block, hash_granules

U32 = np.uint64(32)
ZERO = np.uint64(0)
ONE = np.uint64(1)
SET_MASK = np.uint64((1 << 32) - 1)
EMPTY_SET = np.uint64(0)
ADDING = np.uint64(1 << 32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

# meta of a table; CURSOR is a home of before, and means nothing unless OLD_CAPACITY; IS_BLOCKED: see `table_finish`;
# TOUCHED never means anything
CAPACITY, FILL, LIMIT, OLD_CAPACITY, CURSOR, IS_BLOCKED, TOUCHED = range(7)
META_FIELDS = 7
MOVED_AT_ONCE = 16  # old homes looked at per change, so that growth is over long before there is need to grow again
TOUCHED_AT_ONCE = 512  # slots: far fewer than a cache has lines
PLACES = 1 << 32  # mixed bits of a key: its place in the order of all tables

STORED_KIND = 1  # of the events of a batch

# statuses
DONE, HAND_OVER, HOLDER_FULL, SPACE_FULL, LOG_FULL, GHOSTS_FULL, STEP_MISSING = range(7)


class Table(NamedTuple):
    """Arrays of a table."""

    slots: Any
    meta: Any


class Space(NamedTuple):
    """A key space, from one holder's sight. `uses`: entries per set id; `slot`: the holder's."""

    table: Table
    steps: Table
    uses: Any
    slot: Any


# ---------------------------------------------------------------------- tables


@kernel
def _place(key):
    return (key * _GOLDEN) >> U32


@kernel
def _home(place, capacity):
    return np.int64((place * np.uint64(capacity)) >> U32)


@kernel
def _first_place(home, capacity):
    """The first place with this home."""
    return ((np.uint64(home) << U32) + np.uint64(capacity) - ONE) // np.uint64(capacity)


@kernel
def _capacity_at(meta, place):
    """The capacity that says where a key of this place belongs now."""
    old = meta[OLD_CAPACITY]
    if old > 0 and (_home(place, old) < meta[CURSOR]) == (old < meta[CAPACITY]):
        return old
    return meta[CAPACITY]


@kernel
def _home_now(meta, key):
    place = _place(key)
    return _home(place, _capacity_at(meta, place))


@kernel
def _find(table, key):
    """The slot of this key; if it is not there, -1 less the empty slot where it would go."""
    slots = table.slots
    i = _home_now(table.meta, key)
    while slots[2 * i + 1] != ZERO:
        if slots[2 * i] == key:
            return i
        i += 1
    return -1 - i


@kernel
def _get(table, key):
    """The value of this key, or 0."""
    i = _find(table, key)
    return table.slots[2 * i + 1] if i >= 0 else ZERO


@kernel
def _has_room(table, count):
    return table.meta[FILL] + count <= table.meta[LIMIT]


@kernel
def _write(slots, i, key, value):
    slots[2 * i] = key
    slots[2 * i + 1] = value


@kernel
def _insert_at(table, found, key, value):
    """A key that is not there, where `_find` says; there is room."""
    _write(table.slots, -1 - found, key, value)
    table.meta[FILL] += 1
    _move(table, MOVED_AT_ONCE)


@kernel
def _put(table, key, value):
    """Insert or replace; there is room."""
    i = _find(table, key)
    if i >= 0:
        table.slots[2 * i + 1] = value
    else:
        _insert_at(table, i, key, value)


@kernel
def _remove_at(table, hole):
    """Empty this slot, and move up what probed past it."""
    slots = table.slots
    i = hole + 1
    while slots[2 * i + 1] != ZERO:
        if _home_now(table.meta, slots[2 * i]) <= hole:
            _write(slots, hole, slots[2 * i], slots[2 * i + 1])
            hole = i
        i += 1
    slots[2 * hole + 1] = ZERO
    table.meta[FILL] -= 1
    _move(table, MOVED_AT_ONCE)


@kernel
def _remove(table, key):
    """Take this key out; its value, or 0 if it was not there."""
    i = _find(table, key)
    if i < 0:
        _move(table, MOVED_AT_ONCE)
        return ZERO
    value = table.slots[2 * i + 1]
    _remove_at(table, i)
    return value


@kernel
def _move(table, count):
    """Bring entries of so many more old homes, and those of some others, to where they will belong, if any are left."""
    if table.meta[OLD_CAPACITY] == 0 or table.meta[IS_BLOCKED]:
        return
    if table.meta[OLD_CAPACITY] < table.meta[CAPACITY]:
        _move_up(table, count)
    else:
        _move_down(table, count)


@kernel
def _move_up(table, count):
    """Only what lands behind all that is taken here. Where that is impossible, near the front, moving is blocked.

    Between two empty slots lie whole probes: what is taken leaves no gap in another's way.
    """
    slots, meta = table.slots, table.meta
    start = max(meta[CURSOR] - count, 0)
    while start > 0 and slots[2 * start - 1] != ZERO:
        start -= 1
    end = _end_of_probes(slots, meta[CURSOR] - 1)
    if start * meta[CAPACITY] < end * meta[OLD_CAPACITY]:
        start = _end_of_probes(slots, end * meta[OLD_CAPACITY] // meta[CAPACITY]) + 1
        if start >= meta[CURSOR]:
            meta[IS_BLOCKED] = 1
            return
    meta[CURSOR] = start
    for i in range(end - 1, start - 1, -1):
        _take_along(slots, meta, i)
    if start == 0:
        meta[OLD_CAPACITY] = 0


@kernel
def _move_down(table, count):
    """What is taken lands in the slot where it was or before, and in front of the cursor all has been moved."""
    slots, meta = table.slots, table.meta
    start = meta[CURSOR]
    end = _end_of_probes(slots, min(start + count, meta[OLD_CAPACITY]) - 1) + 1
    meta[CURSOR] = end
    for i in range(start, end):
        _take_along(slots, meta, i)
    if end >= meta[OLD_CAPACITY]:
        meta[OLD_CAPACITY] = 0


@kernel
def _end_of_probes(slots, i):
    """The first empty slot from here on."""
    while slots[2 * i + 1] != ZERO:
        i += 1
    return i


@kernel
def _append(slots, home, key, value):
    """To the probe of this home, in which the key is not."""
    _write(slots, _end_of_probes(slots, home), key, value)


@kernel
def _take_along(slots, meta, i):
    """The entry in this slot, if there is one, to where it belongs now."""
    key, value = slots[2 * i], slots[2 * i + 1]
    if value != ZERO:
        slots[2 * i + 1] = ZERO
        _append(slots, _home_now(meta, key), key, value)


@kernel
def _touch(table, keys, first, end, step):
    """Load the slots where these keys belong. All at once they wait for memory together, later each by itself."""
    seen = ZERO
    for i in range(first, end, step):
        seen ^= table.slots[2 * _home_now(table.meta, keys[i])]
    table.meta[TOUCHED] = np.int64(seen)  # or nobody would load anything


@kernel
def _touch_next(table, keys, first, end):
    """Those from `first` on, as many as at once; the first that was not."""
    stop = min(first + TOUCHED_AT_ONCE, end)
    _touch(table, keys, first, stop, 1)
    return stop


@kernel
def _end(slots, meta):
    """Behind the last entry and the empty slot after it."""
    return _end_of_probes(slots, max(meta[CAPACITY], meta[OLD_CAPACITY]) - 1) + 1


@kernel
def table_get(slots, meta, key):
    return _get(Table(slots, meta), key)


@kernel
def table_put(slots, meta, key, value):
    """Insert or replace. False: there is no room, and nothing happened."""
    table = Table(slots, meta)
    if not _has_room(table, 1) and _find(table, key) < 0:
        return False
    _put(table, key, value)
    return True


@kernel
def table_remove(slots, meta, key):
    return _remove(Table(slots, meta), key)


@kernel
def table_remove_all(slots, meta, keys):
    """Take these keys out, as far as they are there."""
    table = Table(slots, meta)
    touched = 0
    for i in range(len(keys)):
        if i == touched:
            touched = _touch_next(table, keys, i, len(keys))
        _remove(table, keys[i])


@kernel
def table_refill(slots, meta, new_slots, new_meta):
    """Copy all entries into another table, which is empty and has room."""
    for i in range(_end(slots, meta)):
        if slots[2 * i + 1] != ZERO:
            home = _home(_place(slots[2 * i]), new_meta[CAPACITY])
            _append(new_slots, home, slots[2 * i], slots[2 * i + 1])
    new_meta[FILL] = meta[FILL]


@kernel
def table_move(slots, meta, count):
    _move(Table(slots, meta), count)


@kernel
def table_finish(slots, meta, aside):
    """Bring all entries to where they belong, also those that it takes another array for: those near the front, or
    whose probes are that long. `aside`: two words for each entry."""
    table = Table(slots, meta)
    while meta[OLD_CAPACITY] > 0 and not meta[IS_BLOCKED]:
        _move(table, max(MOVED_AT_ONCE, meta[CURSOR] // 4))
    if meta[IS_BLOCKED]:
        _move_front(slots, meta, aside)


@kernel
def _move_front(slots, meta, aside):
    """The rest of a growth, by another array."""
    count = 0
    for i in range(_end_of_probes(slots, meta[CURSOR] - 1)):
        if slots[2 * i + 1] != ZERO:
            _write(aside, count, slots[2 * i], slots[2 * i + 1])
            slots[2 * i + 1] = ZERO
            count += 1
    meta[OLD_CAPACITY] = meta[IS_BLOCKED] = 0
    for i in range(count):
        _append(slots, _home_now(meta, aside[2 * i]), aside[2 * i], aside[2 * i + 1])


@kernel
def table_items(slots, meta, keys, values):
    """Entries, in no order, into two arrays, as many as those have room for; how many.

    Some of many come from all over the table: neighbours would crowd at the same place of another table, too.
    """
    count = 0
    end = _end(slots, meta)
    step = max(1, meta[FILL] // max(1, len(keys)))
    for offset in range(step):
        for i in range(offset, end, step):
            if count == len(keys):
                return count
            if slots[2 * i + 1] != ZERO:
                keys[count], values[count] = slots[2 * i], slots[2 * i + 1]
                count += 1
    return count


@kernel
def table_part(slots, meta, place, count):
    """Slots from the first to before the second, some more than `count` of them: there are all keys from `place` on to
    before the third, which is a place, too."""
    capacity = _capacity_at(meta, place)
    first = _home(place, capacity)
    end = _end_of_probes(slots, min(first + count, capacity) - 1)
    after = _first_place(end + 1, capacity)
    if meta[OLD_CAPACITY] > 0:
        turn = _first_place(meta[CURSOR], meta[OLD_CAPACITY])
        if place < turn:
            after = min(after, turn)
    return first, end, after


@kernel
def table_values(slots, meta, keys, values):
    """The value of each key, 0 where it is not there."""
    table = Table(slots, meta)
    touched = 0
    for i in range(len(keys)):
        if i == touched:
            touched = _touch_next(table, keys, i, len(keys))
        values[i] = _get(table, keys[i])


# ---------------------------------------------------------------------- holder sets


@kernel
def _step_key(slot, direction, set_id):
    """Which step: this holder is added to (direction ADDING) or removed from (0) the set with this id."""
    return (np.uint64(slot) << np.uint64(33)) | direction | set_id


@kernel
def _after(space, direction, set_id):
    """One more than the id of the set after the step; 0 if it was never made."""
    return _get(space.steps, _step_key(space.slot, direction, set_id))


@kernel
def _add_holder(space, key, end):
    """The holder has this key from now on: 1; 0 if it had it already; -1 - set id if a step from there is missing.

    There is room for one more key.
    """
    table = space.table
    i = _find(table, key)
    value = table.slots[2 * i + 1] if i >= 0 else ZERO
    before = value & SET_MASK
    after = _after(space, ADDING, before)
    if after == ZERO:
        return -1 - np.int64(before)
    after -= ONE
    if after == before:
        return 0
    if i < 0:
        _insert_at(table, i, key, (np.uint64(end) << U32) | after)
    else:
        table.slots[2 * i + 1] = value ^ before ^ after
        space.uses[np.int64(before)] -= 1
    space.uses[np.int64(after)] += 1
    return 1


@kernel
def _remove_holder(space, key):
    """The holder has this key no more: 1; 0 if it had it not. As `_add_holder`."""
    return _remove_holder_at(space, _find(space.table, key))


@kernel
def _remove_holder_at(space, i):
    """The same for the key in this slot, or for one that is in none (-1)."""
    table = space.table
    value = table.slots[2 * i + 1] if i >= 0 else ZERO
    before = value & SET_MASK
    after = _after(space, ZERO, before)
    if after == ZERO:
        return -1 - np.int64(before)
    after -= ONE
    if after == before:
        return 0
    if after == EMPTY_SET:
        _remove_at(table, i)
    else:
        table.slots[2 * i + 1] = value ^ before ^ after
        space.uses[np.int64(after)] += 1
    space.uses[np.int64(before)] -= 1
    return 1


@kernel
def space_add(slots, meta, step_slots, step_meta, uses, slot, keys, ends, had, progress):
    """Add the holder in `slot` to `keys`, going on from `progress[0]`; `had[i]`: it was there already.

    Status DONE, SPACE_FULL, or STEP_MISSING with the set's id in `progress[1]`.
    """
    space = Space(Table(slots, meta), Table(step_slots, step_meta), uses, slot)
    touched = progress[0]
    while progress[0] < len(keys):
        i = progress[0]
        if not _has_room(space.table, 1):
            return SPACE_FULL
        if i == touched:
            touched = _touch_next(space.table, keys, i, len(keys))
        outcome = _add_holder(space, keys[i], ends[i])
        if outcome < 0:
            progress[1] = -1 - outcome
            return STEP_MISSING
        had[i] = outcome == 0
        progress[0] += 1
    return DONE


@kernel
def space_remove(slots, meta, step_slots, step_meta, uses, slot, keys, had, progress):
    """Remove the holder from `keys`. As `space_add`."""
    space = Space(Table(slots, meta), Table(step_slots, step_meta), uses, slot)
    touched = progress[0]
    while progress[0] < len(keys):
        if progress[0] == touched:
            touched = _touch_next(space.table, keys, touched, len(keys))
        outcome = _remove_holder(space, keys[progress[0]])
        if outcome < 0:
            progress[1] = -1 - outcome
            return STEP_MISSING
        had[progress[0]] = outcome == 1
        progress[0] += 1
    return DONE


@kernel
def space_renumber(slots, meta, renumbered):
    """Give every entry the new id of its set."""
    for i in range(_end(slots, meta)):
        value = slots[2 * i + 1]
        if value != ZERO:
            set_id = value & SET_MASK
            slots[2 * i + 1] = value ^ set_id ^ renumbered[np.int64(set_id)]


# ---------------------------------------------------------------------- holders


@kernel
def holder_insert(slots, meta, hashes, keys):
    """Put all of these in, or nothing: HOLDER_FULL, or HAND_OVER if one of them is there already or occurs twice."""
    holder = Table(slots, meta)
    _touch(holder, hashes, 0, len(hashes), 1)
    return _hold_all(holder, hashes, 0, keys, 1, len(hashes))


@kernel
def _hold_all(holder, hashes, first, keys, step, count):
    """`keys[(i + 1) * step - 1]` under `hashes[first + i]`; all or nothing."""
    if not _has_room(holder, count):
        return HOLDER_FULL
    for i in range(count):
        key = keys[(i + 1) * step - 1]
        found = _find(holder, hashes[first + i])
        if key == ZERO or found >= 0:
            for j in range(i):
                _remove(holder, hashes[first + j])
            return HAND_OVER
        _insert_at(holder, found, hashes[first + i], key)
    return DONE


# ---------------------------------------------------------------------- what is not verified


@kernel
def links_learn(slots, meta, hashes, parents):
    """Links that are not there yet; there is room."""
    links = Table(slots, meta)
    for i in range(len(hashes)):
        found = _find(links, hashes[i])
        if parents[i] != ZERO and parents[i] != hashes[i] and found < 0:
            _insert_at(links, found, hashes[i], parents[i])


@kernel
def links_note(
    count, kinds, parents, has_parent, hash_ends, hashes, slots, meta, link_slots, link_meta
):  # fmt: skip
    """Links of the blocks that the first `count` events of a batch stored and that are held now; there is room."""
    holder, links = Table(slots, meta), Table(link_slots, link_meta)
    first = np.int64(0)
    for event in range(count):
        if kinds[event] == STORED_KIND:
            parent = parents[event] if has_parent[event] else ZERO
            for i in range(first, hash_ends[event]):
                if parent != ZERO and parent != hashes[i] and _find(holder, hashes[i]) >= 0:
                    _put(links, hashes[i], parent)
                parent = hashes[i]
        first = hash_ends[event]


@kernel
def holder_take_chain(slots, meta, link_slots, link_meta, start, hashes, keys):
    """Take a block and its ancestors out, as far as they are here and linked, and as many as there is room for. Returns
    how many; the parent of the last one, if it has a link, stands behind them in `hashes`, or 0."""
    holder, links = Table(slots, meta), Table(link_slots, link_meta)
    count = 0
    hashes[0] = start
    while count < len(keys):
        key = _remove(holder, hashes[count])
        if key == ZERO:
            break
        keys[count] = key
        count += 1
        hashes[count] = _get(links, hashes[count - 1])
        if hashes[count] == ZERO:
            break
    return count


@kernel
def mark_touching(count, hash_ends, hashes, slots, meta, touching):
    """Which events name a hash that is in this holder."""
    holder = Table(slots, meta)
    first = np.int64(0)
    for event in range(count):
        for i in range(first, hash_ends[event]):
            if _get(holder, hashes[i]) != ZERO:
                touching[event] = True
        first = hash_ends[event]


# ---------------------------------------------------------------------- ghosts

# state of ghosts: two places, how many there are, and how many of them the store does not have; two ordinals
OLDEST, FREE, LIVE, PENDING, ORDINAL, TAKEN = range(6)
GHOST_FIELDS = 6
END_MASK = np.uint64((1 << 32) - 1)
STORED = np.uint64(1 << 32)  # flags beside the end of a prefix: the store may have a row of the hash ...
WIDE = np.uint64(1 << 33)  # ... which is no number


class Log(NamedTuple):
    """Ghosts in the order in which they became that, a place each. `ends`: with flags; 0 is a place that is free."""

    hashes: Any
    keys: Any
    ends: Any
    ordinals: Any
    state: Any


@kernel
def ghosts_remember(
    slots, meta, log_hashes, log_keys, log_ends, ordinals, state, hashes, keys, ends, progress
):  # fmt: skip
    """Append these ghosts, from `progress[0]` on; `places` maps hash -> 1 + place. LOG_FULL, HOLDER_FULL: make room."""
    places, log = Table(slots, meta), Log(log_hashes, log_keys, log_ends, ordinals, state)
    while progress[0] < len(hashes):
        if log.state[FREE] == len(log.hashes):
            return LOG_FULL
        if not _has_room(places, 1):
            return HOLDER_FULL
        i = progress[0]
        known = _get(places, hashes[i])
        flags = _end_ghost(log, np.int64(known) - 1) if known != ZERO else ZERO
        _put(places, hashes[i], np.uint64(log.state[FREE] + 1))
        _append_ghost(log, hashes[i], keys[i], ends[i] | flags)
        progress[0] += 1
    return DONE


@kernel
def _append_ghost(log, engine_hash, key, end):
    state = log.state
    place = state[FREE]
    state[ORDINAL] += 1
    log.hashes[place], log.keys[place], log.ends[place] = engine_hash, key, end
    log.ordinals[place] = state[ORDINAL]
    state[FREE] += 1
    state[LIVE] += 1
    state[PENDING] += 1


@kernel
def _end_ghost(log, place):
    """Free its place; STORED if the store may have a row of it, else 0."""
    is_pending = log.ordinals[place] > log.state[TAKEN]
    flags = log.ends[place] & STORED if is_pending else STORED
    log.ends[place] = ZERO
    log.state[LIVE] -= 1
    if is_pending:
        log.state[PENDING] -= 1
    return flags


@kernel
def ghosts_forget(
    slots, meta, log_hashes, log_keys, log_ends, ordinals, state, count, gone, progress
):  # fmt: skip
    """Forget the oldest, until `progress[0]` of them are. `gone[: progress[1]]`: those that the store may have.

    HAND_OVER: the next one is wide.
    """
    places, log = Table(slots, meta), Log(log_hashes, log_keys, log_ends, ordinals, state)
    while progress[0] < count:
        place = log.state[OLDEST]
        if log.ends[place] & WIDE != ZERO:
            return HAND_OVER
        if log.ends[place] != ZERO:
            _remove(places, log.hashes[place])
            if _end_ghost(log, place) != ZERO:
                gone[progress[1]] = log.hashes[place]
                progress[1] += 1
            progress[0] += 1
        log.state[OLDEST] += 1
    return DONE


@kernel
def ghosts_move(
    slots, meta, log_hashes, log_keys, log_ends, ordinals, state, to_hashes, to_keys, to_ends, to_ordinals
):  # fmt: skip
    """Bring all ghosts into other arrays, close together."""
    places, log = Table(slots, meta), Log(log_hashes, log_keys, log_ends, ordinals, state)
    to = 0
    for place in range(log.state[OLDEST], log.state[FREE]):
        if log.ends[place] == ZERO:
            continue
        to_hashes[to], to_keys[to], to_ends[to] = log.hashes[place], log.keys[place], log.ends[place]
        to_ordinals[to] = log.ordinals[place]
        to += 1
        if log.ends[place] & WIDE == ZERO:
            _put(places, log.hashes[place], np.uint64(to))
    log.state[OLDEST] = 0
    log.state[FREE] = to


# ---------------------------------------------------------------------- whole batches

# progress of `apply_events`
EVENT, STAGE, BLOCK, START, SET_ID, NEEDED = range(6)
LOG_FILL, LOG_ENTRIES, HAS_ALIASES = range(6, 9)
GHOST_FILL, ALIAS_FILL, UNKNOWN_REMOVALS = range(9, 12)
PROGRESS_FIELDS = 12
GHOST_WORDS = 3

# operations in a log of changes; word 0 is `operation | flags << 8 | count << 32`
RUN, GONE, COUNT = 1, 2, 3
ROOTED, KEYED, LOCATED = 1, 2, 4  # flags of a run: starts at the root, has its keys, has its local hashes
RUN_HEAD = 4  # word 0, block tokens | references << 32, parent key, position; then hashes, local hashes, keys


class Batch(NamedTuple):
    """Columns of a batch (see wire/columns.py), and per shape: tokens of a block, seed of its local hashes."""

    kinds: Any
    shape_ids: Any
    parents: Any
    has_parent: Any
    hash_ends: Any
    token_ends: Any
    hashes: Any
    tokens: Any
    block_tokens: Any
    seeds: Any
    granule: Any


class Output(NamedTuple):
    """Where `apply_events` writes: local hashes and keys of a run, changes, new ghosts, keys held twice, progress."""

    local_hashes: Any
    keys: Any
    pair: Any
    log: Any
    ghosts: Any
    aliases: Any
    progress: Any


@kernel
def apply_events(
    count, kinds, shape_ids, parents, has_parent, hash_ends, token_ends, hashes, tokens, block_tokens, seeds, granule,
    holder_slots, holder_meta, extra_slots, extra_meta, space_slots, space_meta,
    step_slots, step_meta, uses, slot, local_hashes, keys, pair, log, ghosts, aliases, progress,
):  # fmt: skip
    """Apply the events of a batch, from `progress[EVENT]` on, to a publisher's one holder. Returns a status.

    HAND_OVER: the event `progress[EVENT]`, from its block `progress[BLOCK]` on, is no plain case.
    """
    batch = Batch(
        kinds, shape_ids, parents, has_parent, hash_ends, token_ends, hashes, tokens, block_tokens, seeds, granule
    )
    holder = Table(holder_slots, holder_meta)
    extra = Table(extra_slots, extra_meta)
    space = Space(Table(space_slots, space_meta), Table(step_slots, step_meta), uses, slot)
    output = Output(local_hashes, keys, pair, log, ghosts, aliases, progress)
    touched = touched_parents = np.int64(0)
    while progress[EVENT] < count:
        event = progress[EVENT]
        first = np.int64(0) if event == 0 else hash_ends[event - 1]
        if event >= touched_parents:
            touched_parents = _touch_next(holder, parents, event, count)
        if first >= touched:
            touched = _touch_next(holder, hashes, first, hash_ends[count - 1])
        if kinds[event] == STORED_KIND:
            status = _apply_stored(batch, event, first, holder, space, output)
        else:
            status = _apply_removed(batch, event, first, holder, extra, space, output)
        if status != DONE:
            return status
        progress[EVENT] += 1
        progress[STAGE] = 0
        progress[BLOCK] = 0
    return DONE


@kernel
def _apply_stored(batch, event, first, holder, space, output):
    """A run of blocks. Stage 0 holds all of its hashes, stage 1 adds the holder to their keys one by one."""
    progress, keys = output.progress, output.keys
    blocks = batch.hash_ends[event] - first
    step = batch.block_tokens[batch.shape_ids[event]] // batch.granule
    if progress[STAGE] == 0:
        status = _hold_run(batch, event, first, blocks, step, holder, space, output)
        if status != DONE:
            return status
        progress[STAGE] = 1
    while progress[BLOCK] < blocks:
        block = progress[BLOCK] + 1
        key = keys[block * step - 1]
        outcome = _add_holder(space, key, progress[START] + block * step)
        if outcome < 0:
            progress[SET_ID] = -1 - outcome
            return STEP_MISSING
        if outcome == 0:
            output.aliases[progress[ALIAS_FILL]] = key
            progress[ALIAS_FILL] += 1
        progress[BLOCK] = block
    return DONE


@kernel
def _hold_run(batch, event, first, blocks, step, holder, space, output):
    progress, log = output.progress, output.log
    tokens_first = np.int64(0) if event == 0 else batch.token_ends[event - 1]
    if batch.token_ends[event] - tokens_first != blocks * step * batch.granule:
        return HAND_OVER
    parent = batch.parents[event]
    parent_key, start = ZERO, np.int64(0)
    if batch.has_parent[event]:
        parent_key = _get(holder, parent)
        if parent_key == ZERO:
            return HAND_OVER
        start = np.int64(_get(space.table, parent_key) >> U32)
    progress[START] = start
    progress[NEEDED] = blocks
    if not _has_room(space.table, blocks):
        return SPACE_FULL
    if progress[LOG_FILL] + RUN_HEAD + 3 * blocks > len(log):
        return LOG_FULL
    seed = batch.seeds[batch.shape_ids[event]]
    hash_granules(batch.tokens, tokens_first, blocks * step, batch.granule, seed, output.local_hashes, 0)
    chain(parent_key, batch.has_parent[event], output.local_hashes, 0, blocks * step, output.keys, 0, output.pair)
    _touch(space.table, output.keys, step - 1, min(blocks, TOUCHED_AT_ONCE) * step, step)
    status = _hold_all(holder, batch.hashes, first, output.keys, step, blocks)
    if status == DONE:
        _log_run(batch, event, first, blocks, step, parent_key, output)
    return status


@kernel
def _log_run(batch, event, first, blocks, step, parent_key, output):
    log, progress = output.log, output.progress
    fill = progress[LOG_FILL]
    flags = LOCATED | (0 if batch.has_parent[event] else ROOTED) | (KEYED if step > 1 else 0)
    log[fill] = np.uint64(RUN | flags << 8) | (np.uint64(blocks) << U32)
    log[fill + 1] = np.uint64(step * batch.granule) | (ONE << U32)
    log[fill + 2] = parent_key
    log[fill + 3] = np.uint64(progress[START] * batch.granule)
    fill += RUN_HEAD
    for i in range(blocks):
        log[fill + i] = batch.hashes[first + i]
    fill += blocks
    for i in range(blocks):
        log[fill + i] = hash_block(output.local_hashes, i * step, step)
    fill += blocks
    if step > 1:
        for i in range(blocks):
            log[fill + i] = output.keys[(i + 1) * step - 1]
        fill += blocks
    progress[LOG_FILL] = fill
    progress[LOG_ENTRIES] += blocks


@kernel
def _apply_removed(batch, event, first, holder, extra, space, output):
    """One reference of each hash ends. Those with more references, or whose keys are held twice, are no plain case."""
    progress, log, ghosts = output.progress, output.log, output.ghosts
    if progress[HAS_ALIASES] != 0 or progress[ALIAS_FILL] > 0:
        return HAND_OVER
    while first + progress[BLOCK] < batch.hash_ends[event]:
        engine_hash = batch.hashes[first + progress[BLOCK]]
        if _get(extra, engine_hash) != ZERO:
            return HAND_OVER
        held = _find(holder, engine_hash)
        if held < 0:
            progress[UNKNOWN_REMOVALS] += 1
            progress[BLOCK] += 1
            continue
        key = holder.slots[2 * held + 1]
        if progress[GHOST_FILL] + GHOST_WORDS > len(ghosts):
            return GHOSTS_FULL
        progress[NEEDED] = 1
        if progress[LOG_FILL] + 2 > len(log):
            return LOG_FULL
        found = _find(space.table, key)
        end = space.table.slots[2 * found + 1] >> U32
        outcome = _remove_holder_at(space, found)
        if outcome < 0:
            progress[SET_ID] = -1 - outcome
            return STEP_MISSING
        _remove_at(holder, held)
        log[progress[LOG_FILL]] = np.uint64(GONE) | (ONE << U32)
        log[progress[LOG_FILL] + 1] = engine_hash
        progress[LOG_FILL] += 2
        progress[LOG_ENTRIES] += 1
        ghosts[progress[GHOST_FILL]] = engine_hash
        ghosts[progress[GHOST_FILL] + 1] = key
        ghosts[progress[GHOST_FILL] + 2] = end
        progress[GHOST_FILL] += GHOST_WORDS
        progress[BLOCK] += 1
    return DONE


# ---------------------------------------------------------------------- changes

UPSERTED, REMOVED, COUNTED = 1, 2, 4  # what a row of coalesced changes has come to
BORN = 8  # its first change was a store: nobody has a row of it


class Rows(NamedTuple):
    """Coalesced changes, a row per hash."""

    hashes: Any
    keys: Any
    parents: Any
    local_hashes: Any
    flags: Any
    block_tokens: Any
    positions: Any
    references: Any
    cohorts: Any
    states: Any


@kernel
def coalesce(
    log, fill, cohort, index_slots, index_meta, scratch, pair, hashes, keys, parents, local_hashes, flags, block_tokens,
    positions, references, cohorts, states,
):  # fmt: skip
    """Fold the operations of a log, all of one cohort, into rows; `index` (engine hash -> 1 + row) goes on from log
    to log.

    There is room for a row per entry. `scratch`: as long as the longest run.
    """
    index = Table(index_slots, index_meta)
    rows = Rows(hashes, keys, parents, local_hashes, flags, block_tokens, positions, references, cohorts, states)
    i = 0
    while i < fill:
        operation, count = log[i] & np.uint64(0xFF), np.int64(log[i] >> U32)
        if operation == RUN:
            i = _fold_run(log, i, count, cohort, index, rows, scratch, pair)
            continue
        if operation == GONE:
            for j in range(i + 1, i + 1 + count):
                row = _row_of(index, rows, log[j])
                rows.states[row] = REMOVED | (rows.states[row] & BORN)
            i += 1 + count
            continue
        row = _row_of(index, rows, log[i + 1])  # COUNT
        rows.references[row], rows.cohorts[row] = np.uint32(count), cohort
        if rows.states[row] == 0:
            rows.states[row] = COUNTED
        i += 2


@kernel
def _row_of(index, rows, engine_hash):
    found = _find(index, engine_hash)
    if found >= 0:
        return np.int64(index.slots[2 * found + 1]) - 1
    row = index.meta[FILL]
    _insert_at(index, found, engine_hash, np.uint64(row + 1))
    rows.hashes[row] = engine_hash
    rows.states[row] = 0
    return row


@kernel
def _fold_run(log, i, count, cohort, index, rows, scratch, pair):
    """The position after the run."""
    flags = np.int64((log[i] >> np.uint64(8)) & np.uint64(0xFF))
    parent, position, tokens = log[i + 2], log[i + 3], log[i + 1] & SET_MASK
    hashes_at = i + RUN_HEAD
    keys_at = hashes_at + count + (count if flags & LOCATED else 0)
    if not flags & KEYED:
        chain(parent, flags & ROOTED == 0, log, hashes_at + count, count, scratch, 0, pair)
    is_rooted = flags & ROOTED
    for j in range(count):
        row = _row_of(index, rows, log[hashes_at + j])
        is_born = rows.states[row] == 0 or rows.states[row] & BORN
        rows.states[row] = UPSERTED | (BORN if is_born else 0)
        rows.keys[row] = log[keys_at + j] if flags & KEYED else scratch[j]
        rows.parents[row] = parent
        rows.local_hashes[row] = log[hashes_at + count + j] if flags & LOCATED else ZERO
        rows.flags[row] = is_rooted | (flags & LOCATED)
        rows.block_tokens[row] = np.uint32(tokens)
        rows.positions[row] = position + np.uint64(j) * tokens
        rows.references[row] = np.uint32(log[i + 1] >> U32)
        rows.cohorts[row] = cohort
        parent, is_rooted = rows.keys[row], 0
    return keys_at + (count if flags & KEYED else 0)


# ---------------------------------------------------------------------- whole prompts


HASHED_AT_ONCE = 64  # granules: the most that are hashed in vain where a walk stops


@kernel
def look_up_prompt(
    tokens, count, granule, first_seed, seed, slots, meta, stops_at_miss, local_hashes, keys, set_ids, runs, pair
):  # fmt: skip
    """Content keys of `count` granules and the sets that hold them; returns how many were looked at, and their runs.

    `first_seed`: of granule 0. `stops_at_miss`: the first granule that nobody holds is the last one looked at. `runs`:
    see `find_runs`.
    """
    table = Table(slots, meta)
    seen = 0
    for first in range(0, count, HASHED_AT_ONCE):
        part = min(HASHED_AT_ONCE, count - first)
        hash_granules(tokens, first * granule, part, granule, seed, local_hashes, first)
        if first == 0:
            hash_granules(tokens, 0, 1, granule, first_seed, local_hashes, 0)
        seen = _look_up_part(table, first, part, stops_at_miss, local_hashes, keys, set_ids, pair)
        if stops_at_miss and set_ids[seen - 1] == 0:
            break
    return seen, find_runs(set_ids, seen, 1, runs)


@kernel
def look_up_hashes(count, slots, meta, stops_at_miss, local_hashes, keys, set_ids, runs, pair):
    """The same from the local hashes of the granules."""
    table = Table(slots, meta)
    seen = 0
    for first in range(0, count, HASHED_AT_ONCE):
        part = min(HASHED_AT_ONCE, count - first)
        seen = _look_up_part(table, first, part, stops_at_miss, local_hashes, keys, set_ids, pair)
        if stops_at_miss and set_ids[seen - 1] == 0:
            break
    return seen, find_runs(set_ids, seen, 1, runs)


@kernel
def _look_up_part(table, first, part, stops_at_miss, local_hashes, keys, set_ids, pair):
    """How many granules were looked at after this part; fewer than are in it if the walk stops there."""
    parent = keys[first - 1] if first > 0 else ZERO
    chain(parent, first > 0, local_hashes, first, part, keys, first, pair)
    _touch(table, keys, first, first + part, 1)
    for j in range(first, first + part):
        set_ids[j] = _get(table, keys[j]) & SET_MASK
        if stops_at_miss and set_ids[j] == 0:
            return j + 1
    return first + part


@kernel
def find_runs(set_ids, count, step, runs):
    """Runs of blocks of `step` granules that the same set of holders has: the set and how many blocks, one after the
    other. Returns how many runs."""
    found = 0
    for end in range(step - 1, count, step):
        if found > 0 and runs[2 * found - 2] == set_ids[end]:
            runs[2 * found - 1] += 1
        else:
            runs[2 * found] = set_ids[end]
            runs[2 * found + 1] = 1
            found += 1
    return found
