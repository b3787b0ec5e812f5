"""One writer per publisher, publishers that go at once and are swept later, commands that reach every replica.

Revision: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UNIQUE = "uq_publishers_worker_id_dp_rank"


def upgrade() -> None:
    op.add_column("publishers", sa.Column("term", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("publishers", sa.Column("writer", sa.Text()))
    op.add_column("publishers", sa.Column("flushes", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("publishers", sa.Column("removed_at", sa.DateTime(timezone=True)))
    op.drop_constraint(UNIQUE, "publishers")
    op.create_index(
        UNIQUE, "publishers", ["worker_id", "dp_rank"], unique=True, postgresql_where=sa.text("removed_at IS NULL")
    )
    op.create_index(
        "ix_publishers_removed_at",
        "publishers",
        ["removed_at"],
        postgresql_where=sa.text("removed_at IS NOT NULL"),
    )
    op.create_table(
        "commands",
        sa.Column("command_id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("publisher_id", sa.BigInteger(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    )


def downgrade() -> None:
    op.drop_table("commands")
    op.execute("DELETE FROM publishers WHERE removed_at IS NOT NULL")
    op.drop_index("ix_publishers_removed_at", "publishers")
    op.drop_index(UNIQUE, "publishers")
    op.create_unique_constraint(UNIQUE, "publishers", ["worker_id", "dp_rank"])
    for column in ("removed_at", "flushes", "writer", "term"):
        op.drop_column("publishers", column)
