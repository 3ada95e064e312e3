"""Fills arguments into urls and bodies, and extracts results from responses."""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from jinfercept.tools.calls import CallFailed

_PLACE = re.compile(r"\{(\w+)\}")


def names_in(template: Any) -> list[str]:
    """The `{argument}`s of a text, or of all texts in a JSON value."""
    if isinstance(template, str):
        return list(dict.fromkeys(_PLACE.findall(template)))
    values = template.values() if isinstance(template, Mapping) else template if isinstance(template, list) else ()
    return list(dict.fromkeys(name for value in values for name in names_in(value)))


def fill_url(template: str, arguments: Mapping[str, Any]) -> str:
    """A url filled with escaped arguments. Raises `CallFailed` for an argument that would change the path."""

    def value(match: re.Match[str]) -> str:
        text = _text(_argument(match[1], arguments))
        if text in (".", "..") or not text:
            raise CallFailed(f"{match[1]} cannot be {text!r} in a url")
        return quote(text.encode(errors="replace"), safe="")

    return _PLACE.sub(value, template)


def fill_json(template: Any, arguments: Mapping[str, Any]) -> Any:
    """A JSON value with its texts filled in. A text that is one `{argument}` becomes the argument, with its type.

    Members whose argument is missing are left out.
    """
    if isinstance(template, Mapping):
        return {
            key: fill_json(value, arguments)
            for key, value in template.items()
            if not (isinstance(value, str) and (whole := _PLACE.fullmatch(value)) and whole[1] not in arguments)
        }
    if isinstance(template, list):
        return [fill_json(value, arguments) for value in template]
    if not isinstance(template, str):
        return template
    if whole := _PLACE.fullmatch(template):
        return _argument(whole[1], arguments)
    return _PLACE.sub(lambda match: _text(_argument(match[1], arguments)), template)


def point(text: str, pointer: str) -> str:
    """The value at a JSON pointer (RFC 6901) in a text. Raises `CallFailed` if the text is not JSON, or has no such value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"the answer is no JSON: {text[:200]}") from error
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise CallFailed(f"the answer has nothing at {pointer}: {text[:200]}") from None
    return _text(value)


def _argument(name: str, arguments: Mapping[str, Any]) -> Any:
    if name not in arguments:
        raise CallFailed(f"the argument {name} is missing")
    return arguments[name]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
