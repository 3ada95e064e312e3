"""Answers as compact JSON in UTF-8, whole or as server-sent events; long arrays are made and encoded in parts."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from itertools import batched
from typing import Any, NamedTuple, final

from starlette.responses import JSONResponse, StreamingResponse

from jinfercept.serve.protocols.errors import ApiError

_LINE_ENDS = (("\x85", r"\u0085"), ("\u2028", r"\u2028"), ("\u2029", r"\u2029"))
_AT_ONCE = 64
"""Items of an array that are encoded at a time, since encoding holds the interpreter's lock."""
_CHUNK_BYTES = 2**18
DONE = b"data: [DONE]\n\n"


@final
class Lazy:
    """An array of small items that are made while they are encoded, once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _as_list(value: object) -> list[Any]:
    if isinstance(value, Lazy):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_list).encode


def encode(data: Any) -> bytes:
    """JSON in UTF-8, in one line: Unicode's line ends are escaped, since some clients split at them.

    A lone surrogate, which a model may write into the name of a call, becomes a question mark.
    """
    written = _dumps(data)
    if not written.isascii():
        for end, escaped in _LINE_ENDS:
            written = written.replace(end, escaped)
    return written.encode("utf-8", "replace")


def encode_parts(data: Any) -> Iterator[bytes]:
    """The bytes that `encode` returns, in parts of bounded size: a long array is encoded some items at a time."""
    if not _is_long(data):
        yield encode(data)
    elif isinstance(data, dict):
        lead = b"{"
        for key, value in data.items():
            yield lead + encode(key) + b":"
            yield from encode_parts(value)
            lead = b","
        yield b"}"
    else:
        lead = b"["
        for items in batched(data, _AT_ONCE):
            if not any(map(_is_long, items)):
                yield lead + encode(items)[1:-1]
                lead = b","
                continue
            for item in items:
                yield lead
                yield from encode_parts(item)
                lead = b","
        yield b"[]" if lead == b"[" else b"]"


def _is_long(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_long, value.values()))
    return isinstance(value, Lazy) or (isinstance(value, list) and (len(value) > _AT_ONCE or any(map(_is_long, value))))


@final
class EncodedReply(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode(content)


@final
class LargeReply(StreamingResponse):
    """A JSON response that is encoded in threads while it is sent: only one chunk of it is in memory."""

    def __init__(self, content: Any) -> None:
        super().__init__(_chunks(encode_parts(content)), media_type="application/json")


async def _chunks(parts: Iterator[bytes]) -> AsyncGenerator[bytes]:
    while chunk := await asyncio.to_thread(_chunk, parts):
        yield chunk


def _chunk(parts: Iterator[bytes]) -> bytes:
    chunk_parts: list[bytes] = []
    num_bytes = 0
    for part in parts:
        chunk_parts.append(part)
        num_bytes += len(part)
        if num_bytes >= _CHUNK_BYTES:
            break
    return b"".join(chunk_parts)


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One event in the wire format; "" is no name."""
    encoded = b"data: " + encode(data) + b"\n\n"
    return f"event: {name}\n".encode() + encoded if name else encoded


async def encode_long_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """`encode_event` in a thread, for large events."""
    encoded = await asyncio.to_thread(lambda: b"".join(encode_parts(data)))
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encoded + b"\n\n"


class StreamFormat(NamedTuple):
    """How a protocol writes a stream.

    Attributes:
        keep_alive: sent while there are no events.
        failed: encodes the end of a stream that fails.
    """

    keep_alive: bytes
    failed: Callable[[ApiError], bytes]
    event: Callable[[Mapping[str, Any]], bytes] = encode_event
    end: bytes = DONE


OPENAI = StreamFormat(b": keep-alive\n\n", lambda error: encode_event(error.body) + DONE)
"""Comments, which clients skip, and an event with the error object."""
