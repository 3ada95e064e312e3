"""Reads JSON bodies as pydantic models.

An agent sends its whole conversation at every turn. The messages with which a list begins as an earlier one of its tenant did,
byte by byte, are not parsed again: they are the same objects, with all that was computed of them.
"""

import json
import re
import secrets
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple, final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from jinfercept.protocols.encoding import encode
from jinfercept.protocols.errors import ApiError, invalid_body
from jinfercept.tenants.quota import Quota

MOST, MOST_BYTES, MAX_AGE_S = 4096, 2**28, 3600.0
LEAST_BYTES = 2**14
"""Size of the smallest body whose list is looked for."""
_ITEM_BYTES = 6000
"""Bytes of an item besides its text: objects, and what chats compute of them."""
_MARK_BYTES = 64
LISTS = {name: re.compile(rb'"%s"[ \t\r\n]*:[ \t\r\n]*\[' % name.encode()) for name in ("messages", "input")}
"""What stands before the first item of a list, by the field of a body that has it."""
_BETWEEN = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
_SCAN = json.JSONDecoder(parse_int=str, parse_float=str).raw_decode
_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits 0, and E an e."""
_EXPONENTS = (b"0e000", b"0e+000")
_MOST_DIGITS = 200


def parsed(body: bytes, model: TypeAdapter[Any] | None) -> Any:
    """A JSON body as a model. Raises `ApiError`: 400 for what is no JSON, or does not fit the model."""
    data = _json(body)
    try:
        return data if model is None else model.validate_python(data)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None


def _json(body: bytes) -> Any:
    try:
        data = from_json(body, allow_inf_nan=False)
        if _has_large_number(body):
            encode(data)
    except ValueError as error:
        surrogate = " (half of a surrogate pair is no text)" if "hex escape" in str(error) else ""
        raise ApiError.bad(f"the body is not JSON: {error}{surrogate}", code="invalid_json") from None
    return data


def _has_large_number(body: bytes) -> bool:
    """Whether a JSON text has perhaps a number that is read as infinite, which JSON does not have."""
    shapes = body.translate(_SHAPES)
    return b"0" * _MOST_DIGITS in shapes or any(exponent in shapes for exponent in _EXPONENTS)


class _Mark(NamedTuple):
    """Some bytes of a list, by which a list that shares them is found; then both are compared."""

    tenant: str
    model: int
    end: int
    text: bytes


class _List(NamedTuple):
    """A list of a body.

    Attributes:
        text: from its first item to the end of its last.
        items: validated.
        until_s: when it is forgotten.
    """

    tenant: str
    text: bytes
    ends: "array[int]"
    items: list[Any]
    marks: set[_Mark]
    until_s: float

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.text) + _ITEM_BYTES * len(self.items)

    def num_shared(self, body: bytes, start: int) -> int:
        """The number of its items with which a list begins that stands at a place of a body."""
        if body.startswith(self.text, start):
            return len(self.ends)
        size = 0  # of what is equal
        step = 1 << len(self.text).bit_length()
        while step := step >> 1:
            if self.text[size : size + step] == body[start + size : start + size + step]:
                size = min(size + step, len(self.text))
        return bisect_left(self.ends, size + 1)


@final
class BodyReader:
    """Reads bodies, and remembers their lists by tenant; each tenant finds its own. Thread-safe.

    Bodies with a `cache_salt` are read whole, so that no salt of a tenant learns of another. Space is shared fairly between
    tenants (`Quota`).

    Args:
        most, most_bytes: maximum lists and bytes; the tenant with the most loses its least recently used list first.
        max_age_s: seconds until a list is forgotten, since a body last had it.
        now: a monotonic clock.
    """

    def __init__(
        self,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        max_age_s: float = MAX_AGE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_age_s, self._now = max_age_s, now
        self._quota = Quota(most, most_bytes)
        self._lists: dict[str, _List] = {}  # least recently used first
        self._marks: dict[_Mark, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lists)

    def read(self, body: bytes, model: TypeAdapter[Any] | None, field: str | None, tenant: str) -> Any:
        """As `parsed`.

        Args:
            field: of the model, "messages" or "input", whose items are remembered; None: there is none.
        """
        if model is None or field is None or len(body) < LEAST_BYTES or b'"cache_salt"' in body:
            return parsed(body, model)
        place = LISTS[field].search(body)
        if place is None:
            return parsed(body, model)
        start = place.end()
        name, number = self._found(tenant, model, body, start)
        mark = secrets.token_hex(16)
        earlier = self._lists.get(name) if number else None
        if earlier is None:
            parsed_body, ends = parsed(body, model), _ends(body, start)
            if not ends or not _is_list(body[:start] + b'"%s"' % mark.encode() + body[start + ends[-1] :], field, mark):
                return parsed_body
        else:
            skipped = earlier.ends[number - 1]
            rest = body[:start] + b'"%s"' % mark.encode() + body[start + skipped :]
            parsed_body = _continued(rest, model, field, mark, earlier.items[:number])
            new = _ends(body, start + skipped)
            if parsed_body is None or new is None:
                return parsed(body, model)
            ends = earlier.ends[:number]
            ends.extend(skipped + end for end in new)
        items = getattr(parsed_body, field, None)
        if isinstance(items, list) and len(items) == len(ends) and getattr(parsed_body, "cache_salt", None) is None:
            self._remember(tenant, model, body[start : start + ends[-1]], ends, items)
        return parsed_body

    def _found(self, tenant: str, model: object, body: bytes, start: int) -> tuple[str, int]:
        """The name of the list that shares the most, and the number of items that it shares; 0: there is none."""
        with self._lock:
            for mark in _marks(tenant, model, body[start:]):
                name = self._marks.get(mark)
                earlier = self._lists[name] if name is not None else None
                if name and earlier and earlier.until_s > self._now() and (shared := earlier.num_shared(body, start)):
                    return name, shared
        return "", 0

    def _remember(self, tenant: str, model: object, text: bytes, ends: "array[int]", items: list[Any]) -> None:
        marks = {*_marks(tenant, model, text)}
        now = self._now()
        entry = _List(tenant, text, ends, items, marks, now + self._max_age_s)
        name = secrets.token_hex(16)
        with self._lock:
            for mark in marks:
                self._take_mark(mark)
            self._lists[name] = entry
            self._marks |= dict.fromkeys(marks, name)
            self._quota.add(tenant, name)
            self._quota.charge(tenant, entry.num_bytes)
            for old in list(takewhile(lambda old: self._lists[old].until_s <= now, self._lists)):
                self._remove(old)
            while (victim := self._quota.victim(tenant)) is not None:
                self._remove(victim)

    def _take_mark(self, mark: _Mark) -> None:
        """Have a mark lead nowhere; a list to which none leads any more is forgotten."""
        name = self._marks.pop(mark, None)
        if name is not None:
            marks = self._lists[name].marks
            marks.discard(mark)
            if not marks:
                self._remove(name)

    def _remove(self, name: str) -> None:
        entry = self._lists.pop(name)
        for mark in entry.marks:
            del self._marks[mark]
        self._quota.remove(entry.tenant, name)
        self._quota.charge(entry.tenant, -entry.num_bytes)


def _marks(tenant: str, model: object, text: bytes) -> Iterator[_Mark]:
    """The marks of a text, those that stand behind the most of it first: one at each power of two."""
    for power in range(len(text).bit_length() - 1, 11, -1):
        end = 1 << power
        yield _Mark(tenant, id(model), end, text[end - _MARK_BYTES : end])


def _ends(body: bytes, start: int) -> "array[int] | None":
    """Where the objects end, from `start` on, that stand there up to the end of their list; None for other items.

    Args:
        body: valid JSON.
    """
    text = body[start:].decode("latin-1")  # the letters of strings do not matter, their ends do
    ends, at = array("q"), 0
    try:
        while True:
            between = _BETWEEN.match(text, at)
            at = between.end() if between else at
            if text[at] == "]":
                return ends
            if text[at] != "{":
                return None
            _, at = _SCAN(text, at)
            ends.append(at)
    except (ValueError, IndexError, RecursionError):
        return None


def _is_list(rest: bytes, field: str, mark: str) -> bool:
    """Whether a mark in place of some items is all that the list of a body has then."""
    try:
        data = from_json(rest)
    except ValueError:
        return False
    return isinstance(data, dict) and data.get(field) == [mark]


def _continued(rest: bytes, model: TypeAdapter[Any], field: str, mark: str, items: list[Any]) -> Any:
    """The model of a body, told from what it is with a mark in place of its leading items; None if it is wrong.

    The mark takes the place of values. So the body is JSON if it is with the mark, and its list begins with these items if it
    begins with the mark then, even if the body names the field several times.
    """
    try:
        data = _json(rest)
        if not isinstance(data, dict) or not isinstance(data.get(field), list) or data[field][:1] != [mark]:
            return None
        data[field][:1] = items
        return model.validate_python(data)
    except (ApiError, ValidationError):
        return None
