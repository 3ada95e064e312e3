"""Answers as bytes: compact JSON, without what JSON and UTF-8 do not have."""

import json
from typing import Any, final

from starlette.responses import JSONResponse

_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode(data: Any) -> bytes:
    """JSON in UTF-8. A model may write half a surrogate pair into the name of a call: it becomes a question mark."""
    return _written(data).encode("utf-8", "replace")


@final
class Reply(JSONResponse):
    """A whole answer."""

    def render(self, content: Any) -> bytes:
        return encode(content)
