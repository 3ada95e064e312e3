"""Rows of calls that wait for a person: each server mirrors its own calls, and reads the answers that others have taken."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from jinfercept.protocols.encoding import encode
from jinfercept.state.queries import ServerClock, clock, insert_new, is_live
from jinfercept.state.tables import InboxRow


class TakenAnswer(NamedTuple):
    """The answer of a person to a call, or its refusal.

    Attributes:
        id: of the call in the inbox.
        text: result of the call, or the reason of the refusal.
        is_declined: whether it is refused.
    """

    id: str
    text: str
    is_declined: bool


def mirror_calls(
    session: Session, server: ServerClock, calls: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> list[TakenAnswer]:
    """Make the rows of a server those of its waiting calls; returns the answers to them that other servers have taken.

    Args:
        calls: by id, the tenant and the document of each call.
    """
    of_server = InboxRow.server_id == server.server_id
    rows = dict(session.execute(select(InboxRow.id, InboxRow.answer).where(of_server)).all())
    if gone := sorted(rows.keys() - calls.keys()):
        session.execute(delete(InboxRow).where(of_server, InboxRow.id.in_(gone)))
    insert_new(
        session,
        InboxRow,
        [
            {
                "id": call_id,
                "tenant": tenant,
                "server_id": server.server_id,
                "asked_at": call["asked_at"],
                "call": encode(call).decode(),
            }
            for call_id, (tenant, call) in calls.items()
            if call_id not in rows
        ],
    )
    return [TakenAnswer(row_id, *json.loads(text)) for row_id, text in rows.items() if text and row_id in calls]


def other_calls(session: Session, server: ServerClock, tenant: str | None) -> Sequence[dict[str, Any]]:
    """Documents of the calls that wait at other servers that live: those of a tenant, or of all."""
    live = is_live(InboxRow.server_id, clock(session), server.lost_s)
    conditions = [InboxRow.server_id != server.server_id, InboxRow.answer.is_(None), live]
    conditions += [] if tenant is None else [InboxRow.tenant == tenant]
    calls = session.scalars(select(InboxRow.call).where(*conditions).order_by(InboxRow.asked_at).limit(1000))
    return [json.loads(call) for call in calls]


def leave_answer(session: Session, server: ServerClock, tenant: str | None, answer: TakenAnswer) -> bool:
    """Leave an answer for the server that runs a call; False if the call does not wait at a server that lives.

    Args:
        tenant: of the call; None: any.
    """
    text = encode([answer.text, answer.is_declined]).decode()
    live = is_live(InboxRow.server_id, clock(session), server.lost_s)
    conditions = [InboxRow.id == answer.id, live] + ([] if tenant is None else [InboxRow.tenant == tenant])
    statement = update(InboxRow).where(*conditions, InboxRow.answer.is_(None)).values(answer=text)
    if session.execute(statement).rowcount:  # pyright: ignore[reportAttributeAccessIssue]
        return True
    return session.scalar(select(InboxRow.answer).where(*conditions)) == text  # an earlier attempt was committed
