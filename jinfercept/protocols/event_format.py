"""The wire format of server-sent events, and what the protocols send besides the events of an answer."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jinfercept.protocols.encoding import encode, encode_parts
from jinfercept.protocols.errors import ApiError

DONE = b"data: [DONE]\n\n"


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One event in the wire format.

    Args:
        data: encoded as JSON.
        name: of the event; "": none.
    """
    encoded = b"data: " + encode(data) + b"\n\n"
    return f"event: {name}\n".encode() + encoded if name else encoded


async def encode_long_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """`encode_event` in a thread, for large events."""
    encoded = await asyncio.to_thread(lambda: b"".join(encode_parts(data)))
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encoded + b"\n\n"


class StreamFormat(NamedTuple):
    """What a protocol sends besides the events of an answer.

    Attributes:
        keep_alive: sent while there are no events.
        failed: encodes the end of a stream that fails.
    """

    keep_alive: bytes
    failed: Callable[[ApiError], bytes]


OPENAI = StreamFormat(b": keep-alive\n\n", lambda error: encode_event(error.body) + DONE)
"""Comments, which clients skip, and an event with the error object."""
