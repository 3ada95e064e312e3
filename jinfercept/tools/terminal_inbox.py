"""Answers calls that wait for a person at the terminal."""

import time
from collections.abc import Callable, Sequence

from jinfercept.calls import Call
from jinfercept.errors import RequestError
from jinfercept.tools.inbox import Inbox

_TIMEOUT_S = 1.0
_POLL_S = 0.02


def answer_calls(
    inbox: Inbox, calls: Sequence[Call], ask: Callable[[], str | None], note: Callable[[str], None]
) -> None:
    """Ask for the results of those calls of a turn that wait for a person; an empty line declines a call.

    Args:
        ask: reads a line; returns None at the end of the input.
        note: shows a text.
    """
    left = sum(call.name in inbox.tools for call in calls)
    until_s = time.monotonic() + _TIMEOUT_S  # a call with wrong arguments never reaches the inbox
    while left and time.monotonic() < until_s:
        for pending in inbox.pending()[:1]:
            arguments = ", ".join(str(value) for value in pending.arguments.values())
            note(f"{pending.tool} asks: {arguments}  (an empty line declines)")
            text = (ask() or "").strip()
            try:
                inbox.answer(pending.id, text) if text else inbox.decline(pending.id)
            except RequestError:
                note("too late: it waits no more")
            left, until_s = left - 1, time.monotonic() + _TIMEOUT_S
        time.sleep(_POLL_S)
