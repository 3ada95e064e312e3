"""Reads the body of a request within limits of time and size, and notices that its client has disconnected."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from jinfercept.serve.access.key_limits import ServedState
from jinfercept.serve.protocols.errors import ApiError


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body of a request, whose `receive` is called.

    Raises:
        ApiError: 413 for a larger body, 408 for a slower one.
        ClientDisconnect: the client closed the connection before.
    """
    declared = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size, more = 0, not (declared.isdecimal() and int(declared) > max_bytes)
    too_large = not more
    try:
        async with asyncio.timeout(timeout_s):
            while more and not too_large:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                too_large = size > max_bytes
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive in {timeout_s:g} s", headers={"Connection": "close"}) from None
    if too_large:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes")
    return b"".join(parts)


async def whole_body(request: Request, service: ServedState) -> bytes:
    """The body of a request as it is sent. Raises as `read_body`, and 415 for one that is encoded."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"the body has Content-Encoding {coding[:80]}: send it as it is")
    return await read_body(request, service.options.max_body_size, service.options.body_timeout)


async def disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection. The body of the request has to be read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled if the client closes the connection: `ApiError` 499."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
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
