"""A response with its input, as it is stored, and its size in memory.

A response holds its own input and output, and refers to the response that it continues, so that conversations share their
prefixes. Bytes count once per key while any stored response needs them.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jinfercept.protocols.openai.response_items import Item
from jinfercept.quota import num_bytes_of

_INDEX_BYTES = 400
"""Memory of the index for one item, without the item."""
_OPEN = ("queued", "in_progress")


class BackgroundRuns(Protocol):
    """The generation of a response in the background."""

    async def cancel(self) -> None:
        """Stop; the response is final afterwards."""
        ...

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        """Its events from number `start` on. Raises 400 if they are not stored."""
        ...


@dataclass(eq=False, repr=False, slots=True)
class StoredResponse:
    """A response with its input. The last five attributes belong to the store.

    Attributes:
        owner: tenant that sent the request.
        response: in its current state; its writer changes it.
        previous: the final response that it continues; None if it begins a conversation.
        asked: its own input items, after `previous`.
        background: its generation, if that runs in the background.
        num_before: items of the conversation before `asked`.
        num_bytes: memory of `response` and `asked`; later of stored events and of the output too.
        num_holders: 1 if it is stored, plus 1 for each response in memory that continues it.
        num_indexed: leading items of the output that are indexed by their ids.
        is_settled: whether the output is complete and counted.
        until_s: expiry, in seconds of the store's clock.
    """

    owner: str
    response: dict[str, Any]
    previous: "StoredResponse | None"
    asked: Sequence[Item]
    background: BackgroundRuns | None = None
    num_bytes: int = 0
    num_before: int = field(init=False)
    num_holders: int = field(init=False, default=0)
    num_indexed: int = field(init=False, default=0)
    is_settled: bool = field(init=False, default=False)
    until_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.num_before = 0 if self.previous is None else self.previous.num_items

    @property
    def name(self) -> str:
        """The response's id."""
        return self.response["id"]

    @property
    def is_open(self) -> bool:
        """Whether it is not final yet."""
        return self.response["status"] in _OPEN

    @property
    def is_pinned(self) -> bool:
        """Whether it is generated in the background and not settled: a final response may lack its last event."""
        return self.background is not None and not self.is_settled

    @property
    def num_items(self) -> int:
        """Number of items of the conversation, its own output included."""
        return self.num_before + len(self.asked) + len(self.response["output"])

    @property
    def before(self) -> list[Item]:
        """Items of the conversation before `asked`."""
        return [] if self.previous is None else self.previous.conversation

    @property
    def conversation(self) -> list[Item]:
        """All items of the conversation, its own output included."""
        parts: list[Sequence[Item]] = []
        one: StoredResponse | None = self
        while one is not None:
            parts += one.response["output"], one.asked
            one = one.previous
        return [item for part in reversed(parts) for item in part]


def measured(items: Sequence[Item], response: Any = None) -> int:
    """Bytes of stored items and of a response in memory. Takes a microsecond per text.

    Log probabilities of a text are many and alike: one is measured for all.
    """
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    reports = [part["logprobs"] for part in parts if part.get("logprobs")]
    num_bytes = len(items) * _INDEX_BYTES + sum(len(some) * num_bytes_of(some[0]) for some in reports)
    return num_bytes + num_bytes_of([*items, response], without=reports)
