"""The tables, declared once: migrations, merges and recovery all read these declarations.

Purpose: the durable truth, and readable: an operator can `select` who holds what. No token ids at rest.

Invariants: a row belongs to a publisher, and goes before it: residencies and ghosts have no foreign key, which would
cost a third of what writing them costs, so only a sweep deletes publishers (`postgres.Store.sweep`); of the publishers
that are registered (`removed_at` is NULL) no two have the same worker and rank; 64-bit hashes are kept bit for bit in
BIGINT as two's complement (2^64 - 1 is -1); an engine hash is kept as bytes, 8 bytes big-endian if it is an integer;
every row of a publisher follows the identity scheme that its publisher row names.

If broken: recovery would load residencies that nobody holds, or compare keys of two different schemes.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from indexer.index.state import EngineHash

_TWO_TO_63 = 1 << 63
_TWO_TO_64 = 1 << 64
_MASK_64 = _TWO_TO_64 - 1


def to_signed(unsigned: int) -> int:
    """The BIGINT with the same 64 bits as `unsigned` (0 <= unsigned < 2^64)."""
    return unsigned - _TWO_TO_64 if unsigned >= _TWO_TO_63 else unsigned


def to_unsigned(signed: int) -> int:
    """The hash with the same 64 bits as the BIGINT `signed`."""
    return signed & _MASK_64


def hash_to_bytes(engine_hash: EngineHash) -> bytes:
    return engine_hash.to_bytes(8, "big") if isinstance(engine_hash, int) else engine_hash


def hash_from_bytes(stored: bytes) -> EngineHash:
    return int.from_bytes(stored, "big") if len(stored) == 8 else stored


class U64(TypeDecorator[int]):
    """An unsigned 64-bit integer, kept as BIGINT in two's complement."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return None if value is None else to_signed(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> int | None:
        return None if value is None else to_unsigned(value)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


publishers = Table(
    "publishers",
    metadata,
    Column("publisher_id", BigInteger, primary_key=True),
    Column("worker_id", Text, nullable=False),
    Column("dp_rank", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("replay_endpoint", Text),
    Column("block_size", Integer),
    Column("options", JSONB, nullable=False),
    Column("scheme", SmallInteger, nullable=False),
    Column("registered_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    # The checkpoint: it changes in the same transaction as the rows it speaks of.
    Column("generation", BigInteger, nullable=False, server_default=text("1")),
    Column("sequence_number", U64),
    Column("fingerprint", U64),
    Column("coverage", Text, nullable=False, server_default=text("'complete'")),
    Column("since", U64),
    Column("coverage_reason", Text, nullable=False, server_default=text("'from_start'")),
    Column("coverage_at", DateTime(timezone=True)),  # NULL: not known
    Column("cohort", Integer, nullable=False, server_default=text("0")),  # gaps that were not repaired
    Column("verified_since", U64),  # the first number after the newest one; NULL: nothing is unverified
    Column("granule", Integer),
    Column("side_state", LargeBinary),
    # Who may write: see lease.py. `flushes` counts the transactions that wrote rows of this publisher.
    Column("term", BigInteger, nullable=False, server_default=text("0")),
    Column("writer", Text),
    Column("flushes", BigInteger, nullable=False, server_default=text("0")),
    # Unregistered: it is gone for everyone, and its rows are swept later.
    Column("removed_at", DateTime(timezone=True)),
)
_IS_REGISTERED = text("removed_at IS NULL")
Index(
    "uq_publishers_worker_id_dp_rank",
    publishers.c.worker_id,
    publishers.c.dp_rank,
    unique=True,
    postgresql_where=_IS_REGISTERED,
)
Index("ix_publishers_removed_at", publishers.c.removed_at, postgresql_where=text("removed_at IS NOT NULL"))

# What operators asked one replica for, for all others: see lease.py. A few, for a minute.
commands = Table(
    "commands",
    metadata,
    Column("command_id", BigInteger, Identity(), primary_key=True),
    Column("publisher_id", BigInteger, nullable=False),
    Column("what", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("made_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

publisher_groups = Table(
    "publisher_groups",
    metadata,
    Column("publisher_id", ForeignKey("publishers.publisher_id", ondelete="CASCADE"), primary_key=True),
    Column("group_idx", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("block_tokens", Integer, nullable=False),
    Column("window_tokens", Integer),
    Column("sizes", ARRAY(Integer), nullable=False),
)

# The places of publishers that hold, or held, blocks. Residencies name them by one small number.
holders = Table(
    "holders",
    metadata,
    Column("holder_id", Integer, Identity(always=True), primary_key=True),
    Column("publisher_id", ForeignKey("publishers.publisher_id", ondelete="CASCADE"), nullable=False),
    Column("medium", Text, nullable=False),
    Column("group_idx", Integer, nullable=False),
    Column("owner", Text, nullable=False),
    UniqueConstraint("publisher_id", "medium", "group_idx", "owner"),
)

residencies = Table(
    "residencies",
    metadata,
    Column("holder_id", Integer, primary_key=True, autoincrement=False),
    Column("engine_hash", LargeBinary, primary_key=True),
    Column("content_key", U64, nullable=False),
    Column("parent_key", U64),  # NULL: the block starts at the root
    Column("local_hash", U64),  # NULL: only the engine hash was announced
    Column("position", BigInteger, nullable=False),
    Column("block_tokens", Integer, nullable=False),
    Column("reference_count", Integer, nullable=False),
    # That of the publisher when the block was verified last: if it is no longer the same, a gap lies between.
    Column("cohort", Integer, nullable=False, server_default=text("0")),
    Index(None, "parent_key", "local_hash"),
    Index(None, "content_key"),
    postgresql_with={"fillfactor": "90"},
)

ghosts = Table(
    "ghosts",
    metadata,
    Column("publisher_id", BigInteger, primary_key=True, autoincrement=False),
    Column("engine_hash", LargeBinary, primary_key=True),
    Column("content_key", U64, nullable=False),
    Column("end_granules", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
)

# What rows were, if that is asked to be kept: see past.py. Written by triggers, in the transaction that changes a row.
residency_changes = Table(
    "residency_changes",
    metadata,
    Column("change_id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("publisher_id", BigInteger, nullable=False),
    Column("medium", Text, nullable=False),
    Column("group_idx", Integer, nullable=False),
    Column("owner", Text, nullable=False),
    Column("engine_hash", LargeBinary, nullable=False),
    Column("content_key", U64, nullable=False),
    # As they were before; NULL: there was no such row.
    Column("position", BigInteger),
    Column("block_tokens", Integer),
    Column("reference_count", Integer),
    Column("cohort", Integer),
    Index(None, "content_key", "at"),
    Index(None, "at"),
)

publisher_states = Table(
    "publisher_states",
    metadata,
    Column("state_id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("publisher_id", BigInteger, nullable=False, index=True),
    Column("publisher", JSONB, nullable=False),  # its row from then on, but for `side_state`
    Column("groups", JSONB, nullable=False),
)

# One row while it is kept: from when on it tells.
past_begins = Table("past_begins", metadata, Column("at", DateTime(timezone=True), primary_key=True))
