"""Why a publisher's coverage is what it is, and since when.

Of rows from before, the usual reason is taken; since when is not known.

Revision: 0002, after 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    reason = sa.Column("coverage_reason", sa.Text(), nullable=False, server_default=sa.text("'from_start'"))
    op.add_column("publishers", reason)
    op.add_column("publishers", sa.Column("coverage_at", sa.DateTime(timezone=True)))
    op.execute("UPDATE publishers SET coverage_reason = 'joined_late' WHERE coverage = 'since'")
    op.execute("UPDATE publishers SET coverage_reason = 'gap' WHERE coverage = 'degraded'")


def downgrade() -> None:
    op.drop_column("publishers", "coverage_at")
    op.drop_column("publishers", "coverage_reason")
