"""The requests whose tokens a grammar allows, and the masks of a step's rows."""

from collections.abc import Callable
from typing import Any, final

from jinfercept.engine.protocols import CopyableConstraint
from jinfercept.engine.session import Session
from jinfercept.sched.plan import Masks
from jinfercept.sched.plan_builder import PlannedStep


@final
class Constraints:
    """The open requests of one engine that have a constraint."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def begin_turn(self, session: Session) -> None:
        """Begin the constraint of a request's next turn, if its grammar has one."""
        grammar = session.request.grammar
        session.constraint = grammar.constrain(session.stop_token_ids) if grammar is not None else None
        if session.constraint is not None:
            self._sessions[session.request.id] = session
            session.sequence.may_draft &= isinstance(session.constraint, CopyableConstraint)
        else:
            self.forget(session.request.id)

    def forget(self, request_id: str) -> None:
        """A request has ended, or has no constraint any more."""
        self._sessions.pop(request_id, None)

    def concern(self, planned: PlannedStep) -> bool:
        """Whether a plan samples for a request with a constraint."""
        sessions = self._sessions
        return bool(sessions) and any(row.sequence.id in sessions for row in planned.sampled)

    def masks(self, planned: PlannedStep, allowed: Callable[[Session], Any | None]) -> Masks:
        """The masks of a plan's constrained rows.

        Args:
            allowed: the words of a request's mask; None if the request has just finished, whose row then has no mask.
        """
        masks = {}
        for row in planned.sampled:
            session = self._sessions.get(row.sequence.id)
            if session is None or row.sequence.epoch != row.epoch:
                continue
            words = allowed(session)
            if words is not None:
                masks[row.place] = words
                masks |= enumerate(session.allowed_after(words, row.drafts), start=row.place + 1)
        return masks
