"""The first tables: those of the code. The first release that changes a table writes them out here, as they were before it."""

from alembic import op

from jinfercept.state.tables import StateTable

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    StateTable.metadata.create_all(op.get_bind())


def downgrade() -> None:
    """Remove the tables, and all that is stored."""
    StateTable.metadata.drop_all(op.get_bind())
