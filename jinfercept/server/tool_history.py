"""Stores, until an expiry, the turns of answers in which the server's tools were called, with their results.

A follow-up request has the one merged message that the client saw. The stored turns replace it, so that the prompt is what the
model wrote, and matches the retained context token by token. A message without stored turns is left unchanged: then the context
is computed again, without the calls.
"""

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, final

from jinfercept.quota import Quota, num_bytes_of
from jinfercept.server.answer_state import merged_message
from jinfercept.server.encoding import encode

MOST = 16384
MOST_BYTES = 2**27

Message = Mapping[str, Any]


class _Entry(NamedTuple):
    owner: str
    content: str  # of the message that the client saw
    turns: tuple[Message, ...]
    until_s: float
    num_bytes: int


@final
class ToolHistory:
    """The stored turns of all owners; each finds its own. Thread-safe. Space is shared fairly between owners (`Quota`).

    The key of an answer that ends in calls of the client is the id of the first one; the key of any other answer is a digest of
    the messages up to its own text.

    Args:
        ttl_s: seconds until an entry expires, since its last use.
        now: a monotonic clock.
        most, most_bytes: maximum entries and bytes; the owner with the most loses its least recently used entry first.
        most_of_owner, most_bytes_of_owner: maximum of one owner; None: no separate limit.
    """

    def __init__(
        self,
        ttl_s: float,
        now: Callable[[], float],
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        *,
        most_of_owner: int | None = None,
        most_bytes_of_owner: int | None = None,
    ) -> None:
        self._ttl_s, self._now = ttl_s, now
        self._quota = Quota(most, most_bytes, most_of_owner=most_of_owner, most_bytes_of_owner=most_bytes_of_owner)
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(
        self, owner: str, salt: str, asked: Sequence[Message], turns: Sequence[Message], client_tools: Collection[str]
    ) -> None:
        """Store the turns of an answer.

        Args:
            owner: tenant of the request.
            salt: derived from the tenant; the entry is found only with the same one.
            asked: messages of the conversation before the answer, from the client.
            turns: messages of the assistant and results of its calls.
            client_tools: names of the tools that the client runs.
        """
        shown = merged_message(turns, client_tools)
        state = hashlib.sha256(salt.encode())
        for message in asked:
            _update(state, message)
        answer = {"role": "assistant", **shown}
        _update(state, answer)
        entry = _Entry(owner, shown["content"], tuple(turns), self._now() + self._ttl_s, num_bytes_of(tuple(turns)))
        with self._lock:
            self._put(_entry_key(salt, answer, state), entry)

    def restored(self, salt: str, messages: Sequence[Message]) -> list[Message]:
        """A conversation in which the stored turns replace the merged messages of their answers."""
        if not self._entries:
            return list(messages)
        restored: list[Message] = []
        state = hashlib.sha256(salt.encode())
        order: dict[str, int] | None = None  # of the calls of a restored turn, while their results follow
        for message in messages:
            _update(state, message)
            if message["role"] == "assistant" and (entry := self._found(_entry_key(salt, message, state), message)):
                restored += entry.turns
                calls = next(turn for turn in reversed(entry.turns) if turn["role"] == "assistant")
                order = {call["id"]: place for place, call in enumerate(calls.get("tool_calls", ()))}
            elif message["role"] == "tool" and order:
                _insert(restored, message, order)
            else:
                restored.append(message)
                order = None
        return restored

    def _found(self, name: str, message: Message) -> _Entry | None:
        """The entry of a key; None if there is none, or if the client has changed the text."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.until_s <= self._now():
                return None
            said = _text(message)
            if said and said != entry.content.strip():
                return None
            self._put(name, entry._replace(until_s=self._now() + self._ttl_s))
            return entry

    def _put(self, name: str, entry: _Entry) -> None:
        """Make an entry the most recent one, and remove expired entries and those beyond the limits."""
        if name in self._entries:
            self._remove(name)
        self._entries[name] = entry
        self._quota.add(entry.owner, name)
        self._quota.charge(entry.owner, entry.num_bytes)
        now = self._now()
        for old in list(takewhile(lambda old: self._entries[old].until_s <= now, self._entries)):
            self._remove(old)
        while (victim := self._quota.victim(entry.owner)) is not None:
            self._remove(victim)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._quota.remove(entry.owner, name)
        self._quota.charge(entry.owner, -entry.num_bytes)


def _entry_key(salt: str, answer: Message, state: Any) -> str:
    """The key of an answer's entry.

    Args:
        state: digest of the conversation, the answer included.
    """
    calls = answer.get("tool_calls")
    return f"{salt}/{calls[0].get('id')}" if calls else state.hexdigest()


def _update(state: Any, message: Message) -> None:
    """Add a message to a digest: the fields that every client sends back, in one form."""
    calls = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or ()]
    said = [message["role"], _text(message), calls, message.get("tool_call_id")]
    data = encode(said)
    state.update(len(data).to_bytes(8) + data)


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return (content if isinstance(content, str) else "".join(part["text"] for part in content)).strip()


def _insert(restored: list[Message], result: Message, order: Mapping[str, int]) -> None:
    """Insert a result among those of its turn in the order of the calls, which some templates need."""
    last = len(order)
    place, at = order.get(result.get("tool_call_id", ""), last), len(restored)
    while restored[at - 1]["role"] == "tool" and order.get(restored[at - 1].get("tool_call_id", ""), last) > place:
        at -= 1
    restored.insert(at, result)
