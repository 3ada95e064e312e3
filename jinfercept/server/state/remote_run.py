"""A response in the background that another server generates."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import final

from jinfercept.protocols.errors import ApiError


@final
class RemoteRun:
    """A response in the background of another server, or of one that has ended (`stored_response.BackgroundRuns`).

    Args:
        request_cancel: has the other server end it.
    """

    def __init__(self, request_cancel: Callable[[], Awaitable[None]]) -> None:
        self._request_cancel = request_cancel

    async def cancel(self) -> None:
        await self._request_cancel()

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        raise ApiError.bad(
            "its events are known only to the server that generated it, while it runs: poll the response", "stream"
        )
