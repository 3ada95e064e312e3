"""Notices that a client has closed its connection, and ends the work that it waits for."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from jinfercept.protocols.errors import ApiError


async def disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection. The body of the request has to be read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled if the client closes the connection.

    Raises:
        ApiError: 499, the client has closed the connection.
    """
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has gone")
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
