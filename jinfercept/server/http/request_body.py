"""Reads the body of a request within limits of time and size."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from jinfercept.protocols.errors import ApiError
from jinfercept.server.http.content_encoding import coding_of, decode_body


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body of a request, decoded.

    Args:
        request: its `receive` is called.
        max_bytes: size of the largest body, as it is sent and as it is decoded.
        timeout_s: seconds until the whole body has to be there.

    Raises:
        ApiError: 413 for a larger body, 408 for a slower one, 415 and 400 for one that cannot be decoded.
        ClientDisconnect: the client closed the connection before.
    """
    coding = coding_of(request.headers.getlist("content-encoding"))
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
        raise ApiError(408, f"the body did not arrive in {timeout_s:g} s") from None
    if too_large:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes")
    body = b"".join(parts)
    return await decode_body(body, coding, max_bytes) if coding and body else body
