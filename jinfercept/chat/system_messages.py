"""Conversations for chat templates that take fewer system messages, or stricter turns, than clients send.

A system text without a message of its own stands in a turn of the user, between `<system>` and `</system>`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, final

from jinfercept.chat.messages import one_call_a_turn

Messages = Sequence[Mapping[str, Any]]

SYSTEM_ROLES = ("system", "developer")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
"""The ids of calls that Mistral's templates take."""

PROBE: tuple[dict[str, Any], ...] = tuple(
    {"role": role, "content": f"@@system-{place}-7d3e"}
    for place, role in enumerate(("system", "system", "user", "assistant", "system", "user"))
)
"""A conversation that a template renders text by text if it takes system messages anywhere."""


def shows_probe(text: str) -> bool:
    """Whether a rendered `PROBE` has the texts of the system and of the user in their order."""
    places = [text.find(message["content"]) for message in PROBE if message["role"] != "assistant"]
    return -1 not in places and places == sorted(places)


def with_leading_system(messages: Messages, keeps_leading: bool = True) -> list[dict[str, Any]]:
    """Rewrite a conversation so that only its first message may be the system's.

    Leading system messages are joined. A later one becomes text of the user's turn in which it stands, after results that it
    would separate from their calls. Without `keeps_leading`, the leading ones become text of the user's turn too.
    """
    leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages)) if keeps_leading else []
    written = _Written()
    if leading:
        contents = [message["content"] for message in leading]
        written.add({**leading[0], "content": _joined(contents)})
    waiting: list[str] = []
    for message in messages[len(leading) :]:
        if message["role"] in SYSTEM_ROLES:
            waiting += [f"<system>\n{message['content']}\n</system>"] if message["content"] else []
        elif message["role"] == "tool" or not waiting:
            written.add(message)
        else:
            written.add_to_user(waiting)
            if message["role"] == "user":
                written.add_to_user([message["content"]])
            else:
                written.add(message)
            waiting = []
    written.add_to_user(waiting)
    return written.whole()


def simpler_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield forms of a conversation for a template that refuses it, the closest first.

    The forms have short ids; one call a turn; alternating turns; the user's text within a result instead of after it; no system
    message; then all of these with plainer turns of the assistant.
    """
    for form in (messages, _with_plainer_turns(messages)):
        if form is not messages and form == messages:
            break
        short = _with_short_ids(form)
        forms = [form] if short == form else [form, short]
        yield from forms if form is not messages else forms[1:]
        for strict in forms:
            yield from _stricter_forms(strict)


def _with_short_ids(messages: Messages) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for message in messages:
        short = dict(message)
        if "tool_call_id" in message:
            short["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            calls = message["tool_calls"]
            short["tool_calls"] = [{**call, "id": _short_id(call["id"])} if "id" in call else call for call in calls]
        written.append(short)
    return written


def _short_id(call_id: Any) -> Any:
    if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _with_plainer_turns(messages: Messages) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for message in messages:
        thought, calls = message.get("reasoning_content"), message.get("tool_calls")
        # some templates refuse turns that models write: with reasoning, text and calls, or cut off in their reasoning
        if calls and thought and message["content"]:
            whole = _joined([thought, message["content"]])
            written.append({**message, "content": "", "reasoning_content": whole, "reasoning": whole})
        elif calls or message["content"] or message["role"] != "assistant":
            written.append(dict(message))
    return written


def _stricter_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    alternating = _alternating(messages, {"user": "user", "assistant": "assistant"})
    behind_results = _alternating(alternating, {"user": "tool"})
    without_system = _alternating(with_leading_system(alternating, keeps_leading=False), {"user": "user"})
    last = None
    for form in (messages, alternating, behind_results, without_system):
        if form == last:
            continue
        if last is not None:
            yield form
        if any(len(message.get("tool_calls", ())) > 1 for message in form):
            yield one_call_a_turn(form)
        last = form


def _alternating(messages: Messages, joined_to: Mapping[str, str]) -> list[dict[str, Any]]:
    written = _Written()
    for message in messages:
        last = written.last
        # a message is joined to the one before, whose role `joined_to` has, unless that one calls
        if joined_to.get(message["role"]) == last["role"] and not last.get("tool_calls"):
            written.join(message)
        else:
            written.add(message)
    return written.whole()


@final
class _Written:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        # contents are joined once, at the end
        self._texts: list[list[str]] = []  # of the contents of the messages

    @property
    def last(self) -> Mapping[str, Any]:
        return self._messages[-1] if self._messages else {"role": ""}

    def add(self, message: Mapping[str, Any]) -> None:
        self._messages.append(dict(message))
        self._texts.append([message.get("content") or ""])

    def join(self, message: Mapping[str, Any]) -> None:
        self._messages[-1] = {**message, **self.last}
        self._texts[-1].append(message["content"])

    def add_to_user(self, texts: Sequence[str]) -> None:
        for text in texts:
            if self.last["role"] == "user":
                self._texts[-1].append(text)
            else:
                self.add({"role": "user", "content": text})

    def whole(self) -> list[dict[str, Any]]:
        return [
            message if len(texts) == 1 else {**message, "content": _joined(texts)}
            for message, texts in zip(self._messages, self._texts, strict=True)
        ]


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, texts))
