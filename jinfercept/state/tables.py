"""The tables of the stored state.

Ids that clients choose are stored as digests (`digest`), since they may have characters that a database refuses. Documents are
JSON in text columns, for the same reason, and are never queried. Times are seconds since 1970 on the clock of `queries.clock`.
"""

import hashlib

from sqlalchemy import BigInteger, Double, ForeignKey, Index, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

OPEN = ("queued", "in_progress")
"""Statuses of responses that are generated."""

_ID = String(64)


class StateTable(DeclarativeBase):
    """Base of all tables."""


class ServerRow(StateTable):
    """A server that uses the database.

    Attributes:
        id: name of the process, new at each start.
        seen_at: time of its last heartbeat.
    """

    __tablename__ = "servers"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    seen_at: Mapped[float] = mapped_column(Double)


class ResponseRow(StateTable):
    """A stored response with its own input.

    Attributes:
        tenant: of its request: the digest of the API key.
        previous_id: the response that it continues, which is not removed before it.
        status: "queued", "in_progress", or final.
        in_background: whether it is generated without a connected client.
        is_cancelled: whether a client has requested its end.
        is_deleted: whether it is deleted for its tenant, and remains for the responses that continue it.
        num_bytes: of the documents.
        response: document without the status.
        asked: list of its input items.
    """

    __tablename__ = "responses"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    tenant: Mapped[str] = mapped_column(_ID)
    previous_id: Mapped[str | None] = mapped_column(_ID, ForeignKey("responses.id"), index=True)
    conversation_id: Mapped[str | None] = mapped_column(_ID)
    status: Mapped[str] = mapped_column(String(16))
    in_background: Mapped[bool]
    server_id: Mapped[str] = mapped_column(_ID)
    is_cancelled: Mapped[bool]
    is_deleted: Mapped[bool]
    created_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float] = mapped_column(Double, index=True)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    response: Mapped[str] = mapped_column(Text)
    asked: Mapped[str] = mapped_column(Text)

    __table_args__ = (
        Index("ix_responses_tenant", "tenant", "created_at", "num_bytes"),
        Index("ix_responses_status", "status", "server_id"),
    )


class ResponseItemRow(StateTable):
    """Where an item of a stored response is: its input first, then its output.

    Attributes:
        item: `digest` of the item's id.
    """

    __tablename__ = "response_items"

    response_id: Mapped[str] = mapped_column(_ID, ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(_ID)
    item: Mapped[str] = mapped_column(_ID)

    __table_args__ = (Index("ix_response_items_item", "tenant", "item"),)


class ConversationRow(StateTable):
    """A conversation.

    Attributes:
        changed_at, expires_at: it expires some time after its last change.
        num_bytes: of its documents.
        turn_id: the response that is generated in it; None if there is none.
        last_response_id: the last response that was generated in it.
        last_write: name of the last change by a client, so that none is made twice.
        about: document with the metadata.
    """

    __tablename__ = "conversations"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    tenant: Mapped[str] = mapped_column(_ID)
    created_at: Mapped[float] = mapped_column(Double)
    changed_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float] = mapped_column(Double, index=True)
    num_items: Mapped[int]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    next_place: Mapped[int]
    turn_id: Mapped[str | None] = mapped_column(_ID)
    turn_server_id: Mapped[str | None] = mapped_column(_ID, index=True)
    last_response_id: Mapped[str | None] = mapped_column(_ID)
    last_write: Mapped[str | None] = mapped_column(_ID)
    about: Mapped[str] = mapped_column(Text)

    __table_args__ = (Index("ix_conversations_tenant", "tenant", "changed_at", "num_bytes"),)


class ConversationItemRow(StateTable):
    """An item of a conversation.

    Attributes:
        place: number that rises with each item of the conversation.
        item: `digest` of the item's id.
        body: document.
    """

    __tablename__ = "conversation_items"

    conversation_id: Mapped[str] = mapped_column(
        _ID, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True
    )
    place: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(_ID)
    item: Mapped[str] = mapped_column(_ID)
    num_bytes: Mapped[int]
    body: Mapped[str] = mapped_column(Text)

    __table_args__ = (Index("ix_conversation_items_item", "tenant", "item"),)


class InboxRow(StateTable):
    """A call that waits for a person at some server.

    Attributes:
        call: document of the call.
        answer: document of the answer that another server has taken; None before.
    """

    __tablename__ = "inbox_calls"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    tenant: Mapped[str] = mapped_column(_ID, index=True)
    server_id: Mapped[str] = mapped_column(_ID, index=True)
    asked_at: Mapped[float] = mapped_column(Double)
    call: Mapped[str] = mapped_column(Text)
    answer: Mapped[str | None] = mapped_column(Text)


def digest(text: str) -> str:
    """SHA-256 of an id in hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
