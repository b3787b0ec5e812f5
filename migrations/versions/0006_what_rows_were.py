"""What rows were at a past time, if that is asked to be kept (`journal_rows_s`): then triggers write it.

Revision: 0006, after 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "residency_changes",
        sa.Column("change_id", sa.BigInteger(), sa.Identity(always=True), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("publisher_id", sa.BigInteger(), nullable=False),
        sa.Column("medium", sa.Text(), nullable=False),
        sa.Column("group_idx", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("engine_hash", sa.LargeBinary(), nullable=False),
        sa.Column("content_key", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger()),
        sa.Column("block_tokens", sa.Integer()),
        sa.Column("reference_count", sa.Integer()),
        sa.Column("cohort", sa.Integer()),
    )
    op.create_index("ix_residency_changes_content_key_at", "residency_changes", ["content_key", "at"])
    op.create_index("ix_residency_changes_at", "residency_changes", ["at"])
    op.create_table(
        "publisher_states",
        sa.Column("state_id", sa.BigInteger(), sa.Identity(always=True), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("publisher_id", sa.BigInteger(), nullable=False),
        sa.Column("publisher", postgresql.JSONB(), nullable=False),
        sa.Column("groups", postgresql.JSONB(), nullable=False),
    )
    op.create_index("ix_publisher_states_publisher_id", "publisher_states", ["publisher_id"])
    op.create_table(
        "past_begins",
        sa.Column("at", sa.DateTime(timezone=True), primary_key=True),
    )


def downgrade() -> None:
    for trigger, table in (
        ("journal_inserts", "residencies"),
        ("journal_deletes", "residencies"),
        ("journal_updates", "residencies"),
        ("journal_registrations", "publishers"),
        ("journal_publishers", "publishers"),
        ("journal_groups", "publisher_groups"),
    ):
        op.execute(f"DROP TRIGGER IF EXISTS {trigger} ON {table}")
    for function in ("journal_residencies", "journal_publisher", "journal_group"):
        op.execute(f"DROP FUNCTION IF EXISTS {function}()")
    for table in ("residency_changes", "publisher_states", "past_begins"):
        op.drop_table(table)
