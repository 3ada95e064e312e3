"""Formats of log records: one line of text or of JSON each."""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
FIELDS = "jinfercept_fields"
"""Attribute of a log record: its fields by name."""
SOCKETS = "uvicorn.error.sockets"
"""The logger of uvicorn's WebSockets."""


def begin_logging(log_format: str, replace: bool = False) -> None:
    """Log to standard error: level info and above of the server and uvicorn, warnings and above of other libraries.

    With `replace` handlers that are there already are removed.
    """
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=replace)
    for name in ("jinfercept", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger(SOCKETS).setLevel(logging.WARNING)  # each has a line of its own


@final
class StderrHandler(logging.Handler):
    """Writes lines to what `sys.stderr` is at the moment: a progress bar replaces it while it is shown.

    Where a tool has closed `sys.stderr`, lines go to the process's standard error. No record raises.
    """

    def emit(self, record: logging.LogRecord) -> None:
        line = "a record of the log cannot be written"
        with suppress(Exception):
            line = self.format(record)
        try:
            print(line, file=sys.stderr, flush=True)
        except Exception:
            with suppress(OSError):
                os.write(2, f"{line}\n".encode(errors="backslashreplace"))


@final
class TextFormatter(logging.Formatter):
    """Time, level and message in one line, behind which a traceback may stand. Control characters of a message, which may have
    texts of clients in it, are escaped: no client writes lines of its own, and none changes a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base's name
        return _CONTROL.sub(lambda char: ascii(char[0])[1:-1], super().formatMessage(record))


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
    """`key=value` pairs; values with blanks or quotes are written as JSON."""
    return " ".join(f"{key}={json.dumps(value) if _needs_quotes(value) else value}" for key, value in fields.items())


def _needs_quotes(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w./:@+-]+", value) is None
