"""Answers as bytes: compact JSON, without what JSON and UTF-8 do not have."""

import json
from typing import Any, final

from starlette.responses import JSONResponse

_LINE_ENDS = (("\x85", r"\u0085"), ("\u2028", r"\u2028"), ("\u2029", r"\u2029"))
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode(data: Any) -> bytes:
    """JSON in UTF-8, in one line to every client: some take what Unicode calls a line's end for one, so these are escaped.

    A model may write half a surrogate pair into the name of a call: it becomes a question mark.
    """
    written = _written(data)
    if not written.isascii():
        for end, escaped in _LINE_ENDS:
            written = written.replace(end, escaped)
    return written.encode("utf-8", "replace")


@final
class Reply(JSONResponse):
    """A whole answer."""

    def render(self, content: Any) -> bytes:
        return encode(content)
