"""How log records are written: a line of text each, or one of JSON."""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, final

FIELDS = "jinfercept_fields"
"""Name of a record's attribute: what it says, by name."""


def begin_logging(log_format: str) -> None:
    """Write what the server and uvicorn have to say to standard error, and warnings of everybody else.

    Args:
        log_format: `text` (key=value) or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    for name in ("jinfercept", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)


@final
class JsonFormatter(logging.Formatter):
    """One object a line: `time`, `level`, and the record's fields or its `message`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created)), "level": record.levelname}
        fields = getattr(record, FIELDS, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def key_values(fields: Mapping[str, Any]) -> str:
    """`key=value` pairs; what has blanks or quotes is written as JSON."""
    return " ".join(f"{key}={json.dumps(value) if _odd(value) else value}" for key, value in fields.items())


def _odd(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w./:@+-]+", value) is None
