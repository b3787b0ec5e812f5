"""Which residencies are verified: those that have the cohort of their publisher.

Of rows from before nothing was set aside yet, so all of them are verified, as they were.

Revision: 0003, after 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("publishers", "residencies"):
        op.add_column(table, sa.Column("cohort", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.add_column("publishers", sa.Column("verified_since", sa.BigInteger()))


def downgrade() -> None:
    """What is not verified is dropped: the older version would credit it."""
    of_publisher = "r.publisher_id = p.publisher_id AND r.cohort <> p.cohort"
    op.execute(f"DELETE FROM residencies r USING publishers p WHERE {of_publisher}")
    op.drop_column("publishers", "verified_since")
    for table in ("publishers", "residencies"):
        op.drop_column(table, "cohort")
