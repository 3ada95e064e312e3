"""Stores, until an expiry, the turns of answers in which the server's tools were called, with their results.

A follow-up request has the one merged message that the client saw. The stored turns replace it, so that the prompt is what the
model wrote, and matches the retained context token by token. A message without stored turns, or one that the client has edited,
is left unchanged: then the context is computed again, without the calls.
"""

from collections.abc import Callable, Sequence
from sys import getsizeof
from typing import Any, final

from jinfercept.chat.messages import Message, checked_message, digests
from jinfercept.sched.tenants import ExpiringEntries, Quota

MOST = 16384
MOST_BYTES = 2**27


@final
class ToolHistory:
    """The stored turns of all tenants; each finds its own. Thread-safe. Space is shared fairly between tenants (`Quota`).

    The key of an answer is a digest of the conversation as the client sees it, up to the answer with its text and its calls:
    ids of calls are no keys, since models choose the same ones in many conversations.

    Args:
        ttl_s: seconds until an entry expires, since its last use.
        now: a monotonic clock.
        most, most_bytes: maximum entries and bytes; the tenant with the most loses its least recently used entry first.
    """

    def __init__(self, ttl_s: float, now: Callable[[], float], most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._turns = ExpiringEntries[tuple[Message, ...]](Quota(most, most_bytes), ttl_s, now)

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, tenant: str, salt: str, messages: Sequence[Message], turns: Sequence[Message]) -> None:
        """Store the turns of an answer.

        Args:
            salt: derived from the tenant; the entry is found only with the same one.
            messages: of the conversation, from the client, and the merged message of the answer.
            turns: messages of the assistant and results of its calls.
        """
        *_, digest = digests([salt], [*map(checked_message, messages)])
        stored = tuple(turns)
        self._turns.put(tenant, digest, stored, num_bytes_of(stored))

    def restored(self, salt: str, messages: Sequence[Message]) -> list[Message]:
        """A conversation in which the stored turns replace the merged messages of their answers.

        Raises:
            RequestError: one of these is no message.
        """
        if not self._turns:
            return list(messages)
        restored: list[Message] = []
        _, *until = digests([salt], [*map(checked_message, messages)])
        for message, digest in zip(messages, until, strict=True):
            turns = self._turns.use(digest) if message["role"] == "assistant" else None
            restored += turns or (message,)
        return restored


def num_bytes_of(value: Any) -> int:
    """Bytes that a JSON value, or a tuple of them, holds in memory: what occurs in it twice counts once."""
    num_bytes, seen, rest = 0, set[int](), [value]
    while rest:
        item = rest.pop()
        if id(item) not in seen:
            seen.add(id(item))
            num_bytes += getsizeof(item)
            if isinstance(item, dict):
                rest += item
                rest += item.values()
            elif isinstance(item, list | tuple):
                rest += item
    return num_bytes
