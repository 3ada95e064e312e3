"""Remembers, for a while, what stood behind answers: the turns in which the server's tools were called, and their results.

A client that goes on sends the one message that it has seen of them. Here the turns are put back in its place, so that the
model reads again what it wrote, and the kept context matches token by token. What is not found any more stays what the client
says: then the context is computed anew, without the calls that nobody remembers.
"""

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, final

from jinfercept.quota import Quota, num_bytes_of
from jinfercept.server.encoding import encode
from jinfercept.server.visible_turns import visible_message

MOST = 16384
MOST_BYTES = 2**27

Message = Mapping[str, Any]


class _Entry(NamedTuple):
    owner: str
    content: str  # that the client has seen
    turns: tuple[Message, ...]
    until_s: float
    num_bytes: int


@final
class ToolHistory:
    """Of all clients; each finds its own. From any thread. Room is shared fairly between owners (`Quota`).

    An answer that ends in calls of the client's is known by the id of the first; any other by the messages before it and its
    text, as a client writes them.

    Args:
        ttl_s: for which one is remembered, from when it was last asked for.
        now: a clock that does not go back.
        most, most_bytes: that are remembered; of the owner that has the most, what was asked for longest ago goes first.
        most_of_owner, most_bytes_of_owner: that are remembered for one owner; None: no less than for all.
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
        self._entries: dict[str, _Entry] = {}  # that was asked for longest ago first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(
        self, owner: str, salt: str, asked: Sequence[Message], turns: Sequence[Message], own: Collection[str]
    ) -> None:
        """What stood behind an answer.

        Args:
            owner: the key that it was asked with.
            salt: found only with the same one; derived from the key.
            asked: the conversation before it, as the client wrote it.
            turns: messages of the assistant and results of its calls.
            own: names of the tools that the client runs.
        """
        shown = visible_message(turns, own)
        state = hashlib.sha256(salt.encode())
        for message in asked:
            _note(state, message)
        answer = {"role": "assistant", **shown}
        _note(state, answer)
        entry = _Entry(owner, shown["content"], tuple(turns), self._now() + self._ttl_s, num_bytes_of(tuple(turns)))
        with self._lock:
            self._put(_name(salt, answer, state), entry)

    def restored(self, salt: str, messages: Sequence[Message]) -> list[Message]:
        """A conversation with what stood behind its answers."""
        if not self._entries:
            return list(messages)
        restored: list[Message] = []
        state = hashlib.sha256(salt.encode())
        order: dict[str, int] | None = None  # of the calls in a turn that was put back and whose results follow
        for message in messages:
            _note(state, message)
            if message["role"] == "assistant" and (entry := self._found(_name(salt, message, state), message)):
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
        """What is remembered by this name, of a client that has not changed the text."""
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
        """Make it the youngest, and forget what is too much or too old."""
        if name in self._entries:
            self._forget(name)
        self._entries[name] = entry
        self._quota.add(entry.owner, name)
        self._quota.charge(entry.owner, entry.num_bytes)
        now = self._now()
        for old in list(takewhile(lambda old: self._entries[old].until_s <= now, self._entries)):
            self._forget(old)
        while (victim := self._quota.victim(entry.owner)) is not None:
            self._forget(victim)

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._quota.remove(entry.owner, name)
        self._quota.charge(entry.owner, -entry.num_bytes)


def _name(salt: str, answer: Message, state: Any) -> str:
    """Of an answer.

    Args:
        state: a digest of the conversation up to it, itself included.
    """
    calls = answer.get("tool_calls")
    return f"{salt}/{calls[0].get('id')}" if calls else state.hexdigest()


def _note(state: Any, message: Message) -> None:
    """Add a message to a digest: what every client sends back, in one form."""
    calls = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or ()]
    said = [message["role"], _text(message), calls, message.get("tool_call_id")]
    data = encode(said)
    state.update(len(data).to_bytes(8) + data)


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return (content if isinstance(content, str) else "".join(part["text"] for part in content)).strip()


def _insert(restored: list[Message], result: Message, order: Mapping[str, int]) -> None:
    """Put a result among those of its turn, in the order of the calls: some templates tell them by nothing else."""
    last = len(order)
    place, at = order.get(result.get("tool_call_id", ""), last), len(restored)
    while restored[at - 1]["role"] == "tool" and order.get(restored[at - 1].get("tool_call_id", ""), last) > place:
        at -= 1
    restored.insert(at, result)
