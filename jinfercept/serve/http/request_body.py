"""Reads the body of a request within limits of time and size, decodes it, and notices that its client has disconnected."""

import asyncio
import zlib
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from jinfercept.serve.access.key_limits import ServedState
from jinfercept.serve.protocols.errors import ApiError

_PIECE_BYTES = 2**16
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": zlib.MAX_WBITS}
"""`wbits` of zlib by the coding."""


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
    """The decoded body of a request. Raises as `read_body`, `coding_of` and `decoded`."""
    coding, most = coding_of(request.headers.getlist("content-encoding")), service.options.max_body_size
    body = await read_body(request, most, service.options.body_timeout)
    if not (coding and body):
        return body
    return await service.prepare(request, lambda: decoded(body, coding, most), num_bytes=len(body))


def coding_of(headers: Sequence[str]) -> str:
    """The coding of a body; "": it has none.

    Args:
        headers: values of `Content-Encoding`.

    Raises:
        ApiError: 415 for codings that are not supported, and for several: each may expand the body a thousand times.
    """
    names = [name.strip().lower() for value in headers for name in value.split(",")]
    codings = [name for name in names if name not in ("", "identity")]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in _WINDOWS:
        message = f"the body has Content-Encoding {', '.join(codings)[:80]}: send it as it is, or with gzip or deflate"
        raise ApiError(415, message, headers={"Accept-Encoding": "gzip, deflate"})
    return codings[0]


def decoded(body: bytes, coding: str, max_bytes: int) -> bytes:
    """A body without its coding. Slow.

    Args:
        coding: see `coding_of`; not "".
        max_bytes: size of the largest decoded body. No more is ever decoded.

    Raises:
        ApiError: 413 for a larger body, 400 for one that does not have the coding.
    """
    decoder, parts, size = zlib.decompressobj(_WINDOWS[coding]), list[bytes](), 0
    try:
        for start in range(0, len(body), _PIECE_BYTES):
            rest = body[start : start + _PIECE_BYTES]
            while rest:
                parts.append(decoder.decompress(rest, _PIECE_BYTES))
                size += len(parts[-1])
                if size > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes when it is decoded")
                rest = decoder.unconsumed_tail
        parts.append(decoder.flush())
    except zlib.error as error:
        raise ApiError.bad(f"the body is not {coding}: {error}", code="invalid_encoding") from None
    if not decoder.eof or decoder.unused_data:
        raise ApiError.bad(f"the body is not {coding}: it ends too early, or not at its end", code="invalid_encoding")
    return b"".join(parts)


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
