"""The loops of the index over flat arrays: tables, holder sets, whole batches of events, whole prompts.

A table maps 64-bit keys to 64-bit values by open addressing: slot i is `slots[2i]` (key) and `slots[2i + 1]` (value);
value 0 is an empty slot, so neither 0 nor DEAD is ever stored. Where a key belongs grows with its mixed bits, so a
table of another size has its entries in the same order: growing moves a few slots of the old arrays per change, from
front to back, and no call waits for all of it. While that lasts, old slots before the cursor were moved, and those
that were emptied are DEAD: probes go on past both. The slot before the cursor is an empty one, so no probe leads past
it, and a key lies in the new arrays if it belongs before the cursor in the old ones, else in those; only what belongs
at their very end (`meta[TAIL]`), from where probes go on at the front, may lie in either. So nobody looks at new slots
before something is moved there: to load them would be to make their memory, far from where it is needed next.

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
DEAD = np.uint64((1 << 64) - 1)
SET_MASK = np.uint64((1 << 32) - 1)
EMPTY_SET = np.uint64(0)
ADDING = np.uint64(1 << 32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

# meta of a table
CAPACITY, FILL, LIMIT, OLD_CAPACITY, CURSOR, OLD_LIVE, TAIL = range(7)
META_FIELDS = 7
MOVED_AT_ONCE = 16  # old slots looked at per change, so that growth is over long before there is need to grow again

NEW, OLD, EITHER = range(3)  # arrays of a table that a key is in, if it is in any

STORED_KIND = 1  # of the events of a batch

# statuses
DONE, HAND_OVER, HOLDER_FULL, SPACE_FULL, LOG_FULL, GHOSTS_FULL, STEP_MISSING = range(7)


class Table(NamedTuple):
    """Arrays of a table. `old` means nothing unless `meta[OLD_CAPACITY]`."""

    slots: Any
    old: Any
    meta: Any


class Space(NamedTuple):
    """A key space, from one holder's sight. `uses`: entries per set id; `slot`: the holder's."""

    table: Table
    steps: Table
    uses: Any
    slot: Any


# ---------------------------------------------------------------------- tables


@kernel
def _home(key, capacity):
    return np.int64((((key * _GOLDEN) >> U32) * np.uint64(capacity)) >> U32)


@kernel
def _is_entry(value):
    """Neither 0 nor DEAD, in one comparison."""
    return value + ONE > ONE


@kernel
def _find(slots, capacity, key):
    """The slot of this key, or -1."""
    i = _home(key, capacity)
    while True:
        value = slots[2 * i + 1]
        if value == ZERO:
            return -1
        if slots[2 * i] == key and value != DEAD:
            return i
        i += 1
        if i == capacity:
            i = 0


@kernel
def _where(meta, key):
    """Which arrays to look into for this key: NEW, OLD or EITHER."""
    if meta[OLD_CAPACITY] == 0:
        return NEW
    home = _home(key, meta[OLD_CAPACITY])
    if home >= meta[TAIL]:
        return EITHER
    return OLD if home >= meta[CURSOR] else NEW


@kernel
def _find_new(table, key, where):
    """The slot of this key in the new arrays, or -1."""
    return -1 if where == OLD else _find(table.slots, table.meta[CAPACITY], key)


@kernel
def _find_old(table, key, where):
    """The slot of this key in the old arrays, if it was not moved yet, or -1."""
    if where == NEW:
        return -1
    i = _find(table.old, table.meta[OLD_CAPACITY], key)
    return i if i >= table.meta[CURSOR] else -1


@kernel
def _get(table, key):
    """The value of this key, or 0."""
    where = _where(table.meta, key)
    i = _find_new(table, key, where)
    if i >= 0:
        return table.slots[2 * i + 1]
    i = _find_old(table, key, where)
    return table.old[2 * i + 1] if i >= 0 else ZERO


@kernel
def _replace(table, key, value):
    """A new value for a key that is there."""
    where = _where(table.meta, key)
    i = _find_new(table, key, where)
    if i >= 0:
        table.slots[2 * i + 1] = value
    else:
        table.old[2 * _find_old(table, key, where) + 1] = value


@kernel
def _place(slots, capacity, key, value):
    i = _home(key, capacity)
    while slots[2 * i + 1] != ZERO:
        i += 1
        if i == capacity:
            i = 0
    slots[2 * i] = key
    slots[2 * i + 1] = value


@kernel
def _move(table, count):
    """Bring the entries of the next `count` old slots over, and of those up to the next empty one."""
    meta = table.meta
    i = meta[CURSOR]
    end = i + count
    moved = 0
    value = ONE
    while i < meta[OLD_CAPACITY] and (i < end or value != ZERO):
        value = table.old[2 * i + 1]
        if _is_entry(value):
            _place(table.slots, meta[CAPACITY], table.old[2 * i], value)
            moved += 1
        i += 1
    meta[FILL] += moved
    meta[OLD_LIVE] -= moved
    meta[CURSOR] = i
    if i == meta[OLD_CAPACITY]:
        meta[OLD_CAPACITY] = 0


@kernel
def _has_room(table, count):
    return table.meta[FILL] + table.meta[OLD_LIVE] + count <= table.meta[LIMIT]


@kernel
def _insert(table, key, value):
    """A key that is not there; there is room."""
    if not _insert_old(table, key, value):
        _place(table.slots, table.meta[CAPACITY], key, value)
        table.meta[FILL] += 1
    if table.meta[OLD_CAPACITY] > 0:
        _move(table, MOVED_AT_ONCE)


@kernel
def _insert_old(table, key, value):
    """Into a place of the old arrays that will be moved later; False if there is none. The new ones are thus filled
    from front to back: touched all over at once, their memory would be made at once, too."""
    meta = table.meta
    if meta[OLD_CAPACITY] == 0:
        return False
    home = i = _home(key, meta[OLD_CAPACITY])
    if i < meta[CURSOR]:
        return False
    while i < meta[OLD_CAPACITY] and _is_entry(table.old[2 * i + 1]):
        i += 1
    if i == meta[OLD_CAPACITY]:
        meta[TAIL] = min(meta[TAIL], home)
        return False
    table.old[2 * i] = key
    table.old[2 * i + 1] = value
    meta[OLD_LIVE] += 1
    return True


@kernel
def _close_hole(slots, capacity, hole):
    """Empty this slot, and move up what probed past it."""
    i = hole
    while True:
        i += 1
        if i == capacity:
            i = 0
        if slots[2 * i + 1] == ZERO:
            break
        home = _home(slots[2 * i], capacity)
        is_between = hole < home <= i if hole <= i else home > hole or home <= i
        if not is_between:
            slots[2 * hole] = slots[2 * i]
            slots[2 * hole + 1] = slots[2 * i + 1]
            hole = i
    slots[2 * hole + 1] = ZERO


@kernel
def _remove(table, key):
    """Take this key out; its value, or 0 if it was not there."""
    where = _where(table.meta, key)
    i = _find_new(table, key, where)
    value = ZERO
    if i >= 0:
        value = table.slots[2 * i + 1]
        _close_hole(table.slots, table.meta[CAPACITY], i)
        table.meta[FILL] -= 1
    else:
        i = _find_old(table, key, where)
        if i >= 0:
            value = table.old[2 * i + 1]
            table.old[2 * i + 1] = DEAD
            table.meta[OLD_LIVE] -= 1
    if table.meta[OLD_CAPACITY] > 0:
        _move(table, MOVED_AT_ONCE)
    return value


@kernel
def _touch(table, keys, first, end, step):
    """Load the slots where these keys belong. All at once they wait for memory together, later each by itself."""
    meta = table.meta
    seen = ZERO
    if meta[OLD_CAPACITY] == 0:
        for i in range(first, end, step):
            seen ^= table.slots[2 * _home(keys[i], meta[CAPACITY])]
    else:
        for i in range(first, end, step):
            home = _home(keys[i], meta[OLD_CAPACITY])
            if home < meta[CURSOR]:
                seen ^= table.slots[2 * _home(keys[i], meta[CAPACITY])]
            else:
                seen ^= table.old[2 * home]
    return seen


@kernel
def table_begin_moving(old, meta):
    """Find the end of the old arrays, from where probes may go on at the front: all behind their last empty slot."""
    tail = meta[OLD_CAPACITY]
    while tail > 0 and old[2 * tail - 1] != ZERO:
        tail -= 1
    meta[TAIL] = tail


@kernel
def table_get(slots, old, meta, key):
    return _get(Table(slots, old, meta), key)


@kernel
def table_put(slots, old, meta, key, value):
    """Insert or replace. False: there is no room, and nothing happened."""
    table = Table(slots, old, meta)
    if _get(table, key) != ZERO:
        _replace(table, key, value)
        return True
    if not _has_room(table, 1):
        return False
    _insert(table, key, value)
    return True


@kernel
def table_remove(slots, old, meta, key):
    return _remove(Table(slots, old, meta), key)


@kernel
def table_remove_all(slots, old, meta, keys):
    """Take these keys out, as far as they are there."""
    table = Table(slots, old, meta)
    for i in range(len(keys)):
        _remove(table, keys[i])


@kernel
def table_move(slots, old, meta, count):
    if meta[OLD_CAPACITY] > 0:
        _move(Table(slots, old, meta), count)


@kernel
def table_items(slots, old, meta, keys, values):
    """Entries, in no order, into two arrays, as many as those have room for; how many.

    Some of many come from all over the table: neighbours would crowd at the same place of another table, too.
    """
    count = 0
    step = max(1, (meta[FILL] + meta[OLD_LIVE]) // max(1, len(keys)))
    for offset in range(step):
        count = _copy_items(slots, offset, meta[CAPACITY], step, keys, values, count)
        count = _copy_items(old, meta[CURSOR] + offset, meta[OLD_CAPACITY], step, keys, values, count)
    return count


@kernel
def table_values(slots, old, meta, keys, values):
    """The value of each key, 0 where it is not there."""
    table = Table(slots, old, meta)
    for i in range(len(keys)):
        values[i] = _get(table, keys[i])


@kernel
def _copy_items(slots, start, end, step, keys, values, count):
    for i in range(start, end, step):
        if count == len(keys):
            break
        value = slots[2 * i + 1]
        if _is_entry(value):
            keys[count] = slots[2 * i]
            values[count] = value
            count += 1
    return count


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
    value = _get(space.table, key)
    before = value & SET_MASK
    after = _after(space, ADDING, before)
    if after == ZERO:
        return -1 - np.int64(before)
    after -= ONE
    if after == before:
        return 0
    if value == ZERO:
        _insert(space.table, key, (np.uint64(end) << U32) | after)
    else:
        _replace(space.table, key, value ^ before ^ after)
        space.uses[np.int64(before)] -= 1
    space.uses[np.int64(after)] += 1
    return 1


@kernel
def _remove_holder(space, key):
    """The holder has this key no more: 1; 0 if it had it not. As `_add_holder`."""
    value = _get(space.table, key)
    before = value & SET_MASK
    after = _after(space, ZERO, before)
    if after == ZERO:
        return -1 - np.int64(before)
    after -= ONE
    if after == before:
        return 0
    if after == EMPTY_SET:
        _remove(space.table, key)
    else:
        _replace(space.table, key, value ^ before ^ after)
        space.uses[np.int64(after)] += 1
    space.uses[np.int64(before)] -= 1
    return 1


@kernel
def space_add(slots, old, meta, step_slots, step_meta, uses, slot, keys, ends, had, progress):
    """Add the holder in `slot` to `keys`, going on from `progress[0]`; `had[i]`: it was there already.

    Status DONE, SPACE_FULL, or STEP_MISSING with the set's id in `progress[1]`.
    """
    space = Space(Table(slots, old, meta), Table(step_slots, step_slots, step_meta), uses, slot)
    while progress[0] < len(keys):
        i = progress[0]
        if not _has_room(space.table, 1):
            return SPACE_FULL
        outcome = _add_holder(space, keys[i], ends[i])
        if outcome < 0:
            progress[1] = -1 - outcome
            return STEP_MISSING
        had[i] = outcome == 0
        progress[0] += 1
    return DONE


@kernel
def space_remove(slots, old, meta, step_slots, step_meta, uses, slot, keys, had, progress):
    """Remove the holder from `keys`. As `space_add`."""
    space = Space(Table(slots, old, meta), Table(step_slots, step_slots, step_meta), uses, slot)
    while progress[0] < len(keys):
        outcome = _remove_holder(space, keys[progress[0]])
        if outcome < 0:
            progress[1] = -1 - outcome
            return STEP_MISSING
        had[progress[0]] = outcome == 1
        progress[0] += 1
    return DONE


@kernel
def space_renumber(slots, old, meta, renumbered):
    """Give every entry the new id of its set."""
    _renumber(slots, 0, meta[CAPACITY], renumbered)
    _renumber(old, meta[CURSOR], meta[OLD_CAPACITY], renumbered)


@kernel
def _renumber(slots, start, end, renumbered):
    for i in range(start, end):
        value = slots[2 * i + 1]
        if _is_entry(value):
            set_id = value & SET_MASK
            slots[2 * i + 1] = value ^ set_id ^ renumbered[np.int64(set_id)]


# ---------------------------------------------------------------------- holders


@kernel
def holder_insert(slots, old, meta, hashes, keys):
    """Put all of these in, or nothing: HOLDER_FULL, or HAND_OVER if one of them is there already or occurs twice."""
    holder = Table(slots, old, meta)
    return _hold_all(holder, hashes, 0, keys, 1, len(hashes))


@kernel
def _hold_all(holder, hashes, first, keys, step, count):
    """`keys[(i + 1) * step - 1]` under `hashes[first + i]`; all or nothing."""
    if not _has_room(holder, count):
        return HOLDER_FULL
    for i in range(count):
        key = keys[(i + 1) * step - 1]
        if key == ZERO or key == DEAD or _get(holder, hashes[first + i]) != ZERO:
            for j in range(i):
                _remove(holder, hashes[first + j])
            return HAND_OVER
        _insert(holder, hashes[first + i], key)
    return DONE


# ---------------------------------------------------------------------- what is not verified


@kernel
def links_learn(slots, old, meta, hashes, parents):
    """Links that are not there yet; there is room."""
    links = Table(slots, old, meta)
    for i in range(len(hashes)):
        if _is_entry(parents[i]) and parents[i] != hashes[i] and _get(links, hashes[i]) == ZERO:
            _insert(links, hashes[i], parents[i])


@kernel
def links_note(
    count, kinds, parents, has_parent, hash_ends, hashes, slots, old, meta, link_slots, link_old, link_meta
):  # fmt: skip
    """Links of the blocks that the first `count` events of a batch stored and that are held now; there is room."""
    holder, links = Table(slots, old, meta), Table(link_slots, link_old, link_meta)
    first = np.int64(0)
    for event in range(count):
        if kinds[event] == STORED_KIND:
            parent = parents[event] if has_parent[event] else ZERO
            for i in range(first, hash_ends[event]):
                if _is_entry(parent) and parent != hashes[i] and _get(holder, hashes[i]) != ZERO:
                    if _get(links, hashes[i]) == ZERO:
                        _insert(links, hashes[i], parent)
                    else:
                        _replace(links, hashes[i], parent)
                parent = hashes[i]
        first = hash_ends[event]


@kernel
def holder_take_chain(slots, old, meta, link_slots, link_old, link_meta, start, hashes, keys):
    """Take a block and its ancestors out, as far as they are here and linked, and as many as there is room for. Returns
    how many; the parent of the last one, if it has a link, stands behind them in `hashes`, or 0."""
    holder, links = Table(slots, old, meta), Table(link_slots, link_old, link_meta)
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
def mark_touching(count, hash_ends, hashes, slots, old, meta, touching):
    """Which events name a hash that is in this holder."""
    holder = Table(slots, old, meta)
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
    slots, old, meta, log_hashes, log_keys, log_ends, ordinals, state, hashes, keys, ends, progress
):  # fmt: skip
    """Append these ghosts, from `progress[0]` on; `places` maps hash -> 1 + place. LOG_FULL, HOLDER_FULL: make room."""
    places, log = Table(slots, old, meta), Log(log_hashes, log_keys, log_ends, ordinals, state)
    while progress[0] < len(hashes):
        if log.state[FREE] == len(log.hashes):
            return LOG_FULL
        if not _has_room(places, 1):
            return HOLDER_FULL
        i = progress[0]
        known = _get(places, hashes[i])
        flags = ZERO
        if known == ZERO:
            _insert(places, hashes[i], np.uint64(log.state[FREE] + 1))
        else:
            flags = _end_ghost(log, np.int64(known) - 1)
            _replace(places, hashes[i], np.uint64(log.state[FREE] + 1))
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
    slots, old, meta, log_hashes, log_keys, log_ends, ordinals, state, count, gone, progress
):  # fmt: skip
    """Forget the oldest, until `progress[0]` of them are. `gone[: progress[1]]`: those that the store may have.

    HAND_OVER: the next one is wide.
    """
    places, log = Table(slots, old, meta), Log(log_hashes, log_keys, log_ends, ordinals, state)
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
    slots, old, meta, log_hashes, log_keys, log_ends, ordinals, state, to_hashes, to_keys, to_ends, to_ordinals
):  # fmt: skip
    """Bring all ghosts into other arrays, close together."""
    places, log = Table(slots, old, meta), Log(log_hashes, log_keys, log_ends, ordinals, state)
    to = 0
    for place in range(log.state[OLDEST], log.state[FREE]):
        if log.ends[place] == ZERO:
            continue
        to_hashes[to], to_keys[to], to_ends[to] = log.hashes[place], log.keys[place], log.ends[place]
        to_ordinals[to] = log.ordinals[place]
        to += 1
        if log.ends[place] & WIDE == ZERO:
            _replace(places, log.hashes[place], np.uint64(to))
    log.state[OLDEST] = 0
    log.state[FREE] = to


# ---------------------------------------------------------------------- whole batches

# progress of `apply_events`
EVENT, STAGE, BLOCK, START, SET_ID, NEEDED = range(6)
LOG_FILL, LOG_ENTRIES, HAS_ALIASES = range(6, 9)
GHOST_FILL, ALIAS_FILL, UNKNOWN_REMOVALS = range(9, 12)
PROGRESS_FIELDS = 12
TOUCHED_MAX = 2_048  # as many as a cache holds
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
    holder_slots, holder_old, holder_meta, extra_slots, extra_old, extra_meta, space_slots, space_old, space_meta,
    step_slots, step_meta, uses, slot, local_hashes, keys, pair, log, ghosts, aliases, progress,
):  # fmt: skip
    """Apply the events of a batch, from `progress[EVENT]` on, to a publisher's one holder. Returns a status.

    HAND_OVER: the event `progress[EVENT]`, from its block `progress[BLOCK]` on, is no plain case.
    """
    batch = Batch(
        kinds, shape_ids, parents, has_parent, hash_ends, token_ends, hashes, tokens, block_tokens, seeds, granule
    )
    holder = Table(holder_slots, holder_old, holder_meta)
    extra = Table(extra_slots, extra_old, extra_meta)
    space = Space(Table(space_slots, space_old, space_meta), Table(step_slots, step_slots, step_meta), uses, slot)
    output = Output(local_hashes, keys, pair, log, ghosts, aliases, progress)
    if progress[EVENT] == 0 and progress[STAGE] == 0:
        pair[0] = _touch(holder, hashes, 0, min(hash_ends[count - 1], TOUCHED_MAX), 1)
        pair[1] = _touch(holder, parents, 0, min(count, TOUCHED_MAX), 1)
    while progress[EVENT] < count:
        event = progress[EVENT]
        first = np.int64(0) if event == 0 else hash_ends[event - 1]
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
    output.pair[0] = _touch(space.table, output.keys, step - 1, min(blocks, TOUCHED_MAX) * step, step)
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
        key = _get(holder, engine_hash)
        if key == ZERO:
            progress[UNKNOWN_REMOVALS] += 1
            progress[BLOCK] += 1
            continue
        if progress[GHOST_FILL] + GHOST_WORDS > len(ghosts):
            return GHOSTS_FULL
        progress[NEEDED] = 1
        if progress[LOG_FILL] + 2 > len(log):
            return LOG_FULL
        end = _get(space.table, key) >> U32
        outcome = _remove_holder(space, key)
        if outcome < 0:
            progress[SET_ID] = -1 - outcome
            return STEP_MISSING
        _remove(holder, engine_hash)
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
    index = Table(index_slots, index_slots, index_meta)
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
    known = _get(index, engine_hash)
    if known != ZERO:
        return np.int64(known) - 1
    row = index.meta[FILL]
    _insert(index, engine_hash, np.uint64(row + 1))
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
    tokens, count, granule, first_seed, seed, slots, old, meta, stops_at_miss, local_hashes, keys, set_ids, runs, pair
):  # fmt: skip
    """Content keys of `count` granules and the sets that hold them; returns how many were looked at, and their runs.

    `first_seed`: of granule 0. `stops_at_miss`: the first granule that nobody holds is the last one looked at. `runs`:
    see `find_runs`.
    """
    table = Table(slots, old, meta)
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
def look_up_hashes(count, slots, old, meta, stops_at_miss, local_hashes, keys, set_ids, runs, pair):
    """The same from the local hashes of the granules."""
    table = Table(slots, old, meta)
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
    pair[0] = _touch(table, keys, first, first + part, 1)
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
