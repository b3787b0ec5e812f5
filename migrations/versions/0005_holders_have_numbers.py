"""Residencies name their holder by a number instead of four columns, and refer to nothing, as ghosts do.

Rows are copied into a new table: twice the space meanwhile, some seconds for a million.

Revision: 0005, after 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

PLACE = "publisher_id, medium, group_idx, owner"
VALUES = "engine_hash, content_key, parent_key, local_hash, position, block_tokens, reference_count, cohort"
REFERENCE = "fk_{}_publisher_id"


def upgrade() -> None:
    _create_holders()
    op.execute(f"INSERT INTO holders ({PLACE}) SELECT DISTINCT {PLACE} FROM residencies")
    narrow = sa.Column("holder_id", sa.Integer(), nullable=False)
    _replace_residencies([narrow], "holder_id", f"residencies JOIN holders USING ({PLACE})", ["holder_id"])
    op.drop_constraint(REFERENCE.format("ghosts"), "ghosts")


def downgrade() -> None:
    """What a sweep would have deleted goes: the older version expects references."""
    op.execute("DELETE FROM ghosts WHERE publisher_id NOT IN (SELECT publisher_id FROM publishers)")
    _refer_to_publishers("ghosts")
    wide = [
        sa.Column("publisher_id", sa.BigInteger(), nullable=False),
        sa.Column("medium", sa.Text(), nullable=False),
        sa.Column("group_idx", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
    ]
    _replace_residencies(wide, PLACE, "residencies JOIN holders USING (holder_id)", PLACE.split(", "))
    _refer_to_publishers("residencies")
    op.drop_table("holders")


def _create_holders() -> None:
    publisher = sa.ForeignKey("publishers.publisher_id", ondelete="CASCADE", name=REFERENCE.format("holders"))
    op.create_table(
        "holders",
        sa.Column("holder_id", sa.Integer(), sa.Identity(always=True), primary_key=True),
        sa.Column("publisher_id", sa.BigInteger(), publisher, nullable=False),
        sa.Column("medium", sa.Text(), nullable=False),
        sa.Column("group_idx", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.UniqueConstraint(
            "publisher_id", "medium", "group_idx", "owner", name="uq_holders_publisher_id_medium_group_idx_owner"
        ),
    )


def _replace_residencies(place: list[sa.Column[int]], names: str, source: str, key: list[str]) -> None:
    """The same rows in a table that begins with other columns; indexes are built when they are there."""
    op.create_table(
        "new_residencies",
        *place,
        sa.Column("engine_hash", sa.LargeBinary(), nullable=False),
        sa.Column("content_key", sa.BigInteger(), nullable=False),
        sa.Column("parent_key", sa.BigInteger()),
        sa.Column("local_hash", sa.BigInteger()),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("reference_count", sa.Integer(), nullable=False),
        sa.Column("cohort", sa.Integer(), nullable=False, server_default=sa.text("0")),
        postgresql_with={"fillfactor": "90"},
    )
    op.execute(f"INSERT INTO new_residencies ({names}, {VALUES}) SELECT {names}, {VALUES} FROM {source}")
    op.drop_table("residencies")
    op.rename_table("new_residencies", "residencies")
    op.create_primary_key("pk_residencies", "residencies", [*key, "engine_hash"])
    op.create_index("ix_residencies_parent_key_local_hash", "residencies", ["parent_key", "local_hash"])
    op.create_index("ix_residencies_content_key", "residencies", ["content_key"])


def _refer_to_publishers(table: str) -> None:
    op.create_foreign_key(
        REFERENCE.format(table), table, "publishers", ["publisher_id"], ["publisher_id"], ondelete="CASCADE"
    )
