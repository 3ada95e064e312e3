"""A response with its input, as it is stored, and its generation in the background."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item
from jinfercept.state.tables import OPEN


class BackgroundRuns(Protocol):
    """The generation of a response in the background."""

    async def cancel(self) -> None:
        """Stop; the response is final afterwards."""
        ...

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        """The events from number `start` on. Raises 400 if they are not stored."""
        ...


@final
class RemoteRun:
    """A response in the background of another server, or one whose events are not kept (`BackgroundRuns`).

    Args:
        request_cancel: has the other server end it.
    """

    def __init__(self, request_cancel: Callable[[], Awaitable[None]]) -> None:
        self._request_cancel = request_cancel

    async def cancel(self) -> None:
        await self._request_cancel()

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        raise ApiError.bad(
            "only the server that generates a response can stream its events; fix: poll the response", "stream"
        )


@dataclass(eq=False, repr=False, slots=True)
class StoredResponse:
    """A response with its input. It refers to the response that it continues. The last two attributes belong to the store.

    Attributes:
        tenant: that sent the request.
        response: in its current state; its writer changes it.
        previous: the final response that it continues; None if it begins a conversation.
        inputs: its own input items, after `previous`.
        background: its generation, if that runs in the background.
        body_bytes: of the body of its request.
        num_before: items of the conversation before `inputs`.
        event_bytes: of its stored events.
        until_s: end of its events, in seconds of the event loop's clock.
    """

    tenant: str
    response: dict[str, Any]
    previous: "StoredResponse | None"
    inputs: Sequence[Item]
    background: BackgroundRuns | None = None
    body_bytes: int = 0
    num_before: int = field(init=False)
    event_bytes: int = field(init=False, default=0)
    until_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.num_before = 0 if self.previous is None else self.previous.num_items

    @property
    def name(self) -> str:
        return self.response["id"]

    @property
    def is_open(self) -> bool:
        """Whether it is not final yet."""
        return self.response["status"] in OPEN

    @property
    def num_items(self) -> int:
        """Number of items of the conversation, its own output included."""
        return self.num_before + len(self.inputs) + len(self.response["output"])

    @property
    def before(self) -> list[Item]:
        """Items of the conversation before `inputs`."""
        return [] if self.previous is None else self.previous.conversation

    @property
    def conversation(self) -> list[Item]:
        """All items of the conversation, its own output included."""
        parts: list[Sequence[Item]] = []
        response: StoredResponse | None = self
        while response is not None:
            parts += response.response["output"], response.inputs
            response = response.previous
        return [item for part in reversed(parts) for item in part]
