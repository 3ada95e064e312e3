"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("next_place", sa.Integer(), nullable=False),
        sa.Column("turn_id", sa.String(length=64), nullable=True),
        sa.Column("turn_server_id", sa.String(length=64), nullable=True),
        sa.Column("last_response_id", sa.String(length=64), nullable=True),
        sa.Column("last_write", sa.String(length=64), nullable=True),
        sa.Column("about", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_conversations_expires_at", "conversations", ["expires_at"], unique=False)
    op.create_index("ix_conversations_owner", "conversations", ["owner", "changed_at", "num_bytes"], unique=False)
    op.create_index("ix_conversations_turn_server_id", "conversations", ["turn_server_id"], unique=False)
    op.create_table(
        "inbox_calls",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("server_id", sa.String(length=64), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_inbox_calls_owner", "inbox_calls", ["owner"], unique=False)
    op.create_index("ix_inbox_calls_server_id", "inbox_calls", ["server_id"], unique=False)
    op.create_table(
        "responses",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("previous_id", sa.String(length=64), nullable=True),
        sa.Column("conversation_id", sa.String(length=64), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("in_background", sa.Boolean(), nullable=False),
        sa.Column("server_id", sa.String(length=64), nullable=False),
        sa.Column("is_cancelled", sa.Boolean(), nullable=False),
        sa.Column("is_deleted", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("asked", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["previous_id"], ["responses.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_responses_expires_at", "responses", ["expires_at"], unique=False)
    op.create_index("ix_responses_owner", "responses", ["owner", "created_at", "num_bytes"], unique=False)
    op.create_index("ix_responses_previous_id", "responses", ["previous_id"], unique=False)
    op.create_index("ix_responses_status", "responses", ["status", "server_id"], unique=False)
    op.create_table(
        "servers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.String(length=64), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("item", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["conversation_id"], ["conversations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("conversation_id", "place"),
    )
    op.create_index("ix_conversation_items_item", "conversation_items", ["owner", "item"], unique=False)
    op.create_table(
        "response_items",
        sa.Column("response_id", sa.String(length=64), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("item", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["response_id"], ["responses.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("response_id", "place"),
    )
    op.create_index("ix_response_items_item", "response_items", ["owner", "item"], unique=False)


def downgrade() -> None:
    """Remove the tables, and all that is stored."""
    for table in ("response_items", "conversation_items", "servers", "responses", "inbox_calls", "conversations"):
        op.drop_table(table)
