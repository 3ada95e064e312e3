"""Calls that wait for a person, put to whoever sits at the terminal."""

import time
from collections.abc import Callable, Sequence

from jinfercept.endpoints.inbox import Inbox
from jinfercept.errors import RequestError
from jinfercept.request import Call

_PATIENCE_S = 1.0
_LOOK_S = 0.02


def answer_calls(
    inbox: Inbox, calls: Sequence[Call], ask: Callable[[], str | None], note: Callable[[str], None]
) -> None:
    """Have those of a turn's calls answered that are put to a person; a line that is empty declines.

    Args:
        ask: for a line; None if there are no more.
        note: shows something.
    """
    left = sum(call.name in inbox.tools for call in calls)
    until_s = time.monotonic() + _PATIENCE_S  # a call whose arguments do not fit never comes
    while left and time.monotonic() < until_s:
        for pending in inbox.pending()[:1]:
            said = ", ".join(str(value) for value in pending.arguments.values())
            note(f"{pending.tool} asks: {said}  (an empty line declines)")
            text = (ask() or "").strip()
            try:
                inbox.answer(pending.id, text) if text else inbox.decline(pending.id)
            except RequestError:
                note("too late: it waits no more")
            left, until_s = left - 1, time.monotonic() + _PATIENCE_S
        time.sleep(_LOOK_S)
