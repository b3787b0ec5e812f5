"""Publishers, their groups, residencies and ghosts.

Revision: 0001, the first
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_publishers()
    _create_publisher_groups()
    _create_residencies()
    _create_ghosts()


def downgrade() -> None:
    for table in ("ghosts", "residencies", "publisher_groups", "publishers"):
        op.drop_table(table)


def _create_publishers() -> None:
    op.create_table(
        "publishers",
        sa.Column("publisher_id", sa.BigInteger(), primary_key=True),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("dp_rank", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("replay_endpoint", sa.Text()),
        sa.Column("block_size", sa.Integer()),
        sa.Column("options", postgresql.JSONB(), nullable=False),
        sa.Column("scheme", sa.SmallInteger(), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("generation", sa.BigInteger(), nullable=False, server_default=sa.text("1")),
        sa.Column("sequence_number", sa.BigInteger()),
        sa.Column("fingerprint", sa.BigInteger()),
        sa.Column("coverage", sa.Text(), nullable=False, server_default=sa.text("'complete'")),
        sa.Column("since", sa.BigInteger()),
        sa.Column("granule", sa.Integer()),
        sa.Column("side_state", sa.LargeBinary()),
        sa.UniqueConstraint("worker_id", "dp_rank", name="uq_publishers_worker_id_dp_rank"),
    )


def _create_publisher_groups() -> None:
    op.create_table(
        "publisher_groups",
        _publisher_reference("publisher_groups"),
        sa.Column("group_idx", sa.Integer(), primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("window_tokens", sa.Integer()),
        sa.Column("sizes", postgresql.ARRAY(sa.Integer()), nullable=False),
    )


def _create_residencies() -> None:
    op.create_table(
        "residencies",
        _publisher_reference("residencies"),
        sa.Column("medium", sa.Text(), primary_key=True),
        sa.Column("group_idx", sa.Integer(), primary_key=True),
        sa.Column("owner", sa.Text(), primary_key=True),
        sa.Column("engine_hash", sa.LargeBinary(), primary_key=True),
        sa.Column("content_key", sa.BigInteger(), nullable=False),
        sa.Column("parent_key", sa.BigInteger()),
        sa.Column("local_hash", sa.BigInteger()),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("reference_count", sa.Integer(), nullable=False),
        postgresql_with={"fillfactor": "90"},
    )
    op.create_index("ix_residencies_parent_key_local_hash", "residencies", ["parent_key", "local_hash"])
    op.create_index("ix_residencies_content_key", "residencies", ["content_key"])


def _create_ghosts() -> None:
    op.create_table(
        "ghosts",
        _publisher_reference("ghosts"),
        sa.Column("engine_hash", sa.LargeBinary(), primary_key=True),
        sa.Column("content_key", sa.BigInteger(), nullable=False),
        sa.Column("end_granules", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
    )


def _publisher_reference(table: str) -> sa.Column[int]:
    target = sa.ForeignKey("publishers.publisher_id", ondelete="CASCADE", name=f"fk_{table}_publisher_id")
    return sa.Column("publisher_id", sa.BigInteger(), target, primary_key=True)
