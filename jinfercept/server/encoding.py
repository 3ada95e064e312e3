"""Answers as bytes: compact JSON, without what JSON and UTF-8 do not have."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import islice
from typing import Any, final

from starlette.responses import JSONResponse, StreamingResponse

_LINE_ENDS = (("\x85", r"\u0085"), ("\u2028", r"\u2028"), ("\u2029", r"\u2029"))
_AT_ONCE = 64
"""Items of an array that are encoded at a time: the interpreter's lock is held meanwhile."""
_CHUNK_BYTES = 2**18


@final
class Lazy:
    """An array of small items that are made when they are encoded, once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _listed(value: object) -> list[Any]:
    if isinstance(value, Lazy):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_listed).encode


def encode(data: Any) -> bytes:
    """JSON in UTF-8, in one line to every client: some take what Unicode calls a line's end for one, so these are escaped.

    A model may write half a surrogate pair into the name of a call: it becomes a question mark.
    """
    written = _written(data)
    if not written.isascii():
        for end, escaped in _LINE_ENDS:
            written = written.replace(end, escaped)
    return written.encode("utf-8", "replace")


def encode_parts(data: Any) -> Iterator[bytes]:
    """What `encode` returns, in parts of bounded size: a long array is encoded some items at a time."""
    if isinstance(data, dict) and _is_long(data):
        lead = b"{"
        for key, value in data.items():
            yield lead + encode(key) + b":"
            yield from encode_parts(value)
            lead = b","
        yield b"}"
    elif isinstance(data, Lazy):
        lead = b"["
        for items in _batches(data):
            yield lead + encode(items)[1:-1]
            lead = b","
        yield b"[]" if lead == b"[" else b"]"
    elif isinstance(data, list) and _is_long(data):
        lead = b"["
        for items in _batches(data):
            yield lead
            yield from _items(items)
            lead = b","
        yield b"]"
    else:
        yield encode(data)


def _items(items: list[Any]) -> Iterator[bytes]:
    """Some items of an array, without its brackets."""
    if not any(map(_is_long, items)):
        yield encode(items)[1:-1]
        return
    for place, item in enumerate(items):
        if place:
            yield b","
        yield from encode_parts(item)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    left = iter(items)
    while batch := list(islice(left, _AT_ONCE)):
        yield batch


def _is_long(value: Any) -> bool:
    """Whether there is an array in it that is encoded in parts."""
    if isinstance(value, dict):
        return any(map(_is_long, value.values()))
    return isinstance(value, Lazy) or (isinstance(value, list) and (len(value) > _AT_ONCE or any(map(_is_long, value))))


@final
class EncodedReply(JSONResponse):
    """A whole answer."""

    def render(self, content: Any) -> bytes:
        return encode(content)


@final
class LargeReply(StreamingResponse):
    """The same, encoded in threads while it is sent: no more than a chunk of it is in memory."""

    def __init__(self, content: Any) -> None:
        super().__init__(_chunks(encode_parts(content)), media_type="application/json")


async def _chunks(parts: Iterator[bytes]) -> AsyncGenerator[bytes]:
    while chunk := await asyncio.to_thread(_chunk, parts):
        yield chunk


def _chunk(parts: Iterator[bytes]) -> bytes:
    taken: list[bytes] = []
    num_bytes = 0
    for part in parts:
        taken.append(part)
        num_bytes += len(part)
        if num_bytes >= _CHUNK_BYTES:
            break
    return b"".join(taken)
