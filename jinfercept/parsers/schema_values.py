"""Converts values that a model wrote as plain text to the types of a JSON schema."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinfercept.parsers.json_values import distinct
from jinfercept.parsers.python_literals import literal
from jinfercept.parsers.tool_schemas import at_reference
from jinfercept.values.enforceable_schema import json_type

_MOST_EXACT = 2**53
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def property_types(schema: Mapping[str, Any], name: str) -> list[str]:
    """The JSON types that an object's schema allows for one property, in its order; empty if it names none.

    Args:
        schema: of the object; `$ref`s into itself are known.
    """
    properties = schema.get("properties")
    declared = properties.get(name, {}) if isinstance(properties, Mapping) else {}
    return _types(declared, schema, set())


def value_of(text: str, types: Sequence[str]) -> Any:
    """A value, of the first type that is allowed and that the text can be; else the text itself.

    As in vLLM's `qwen3_coder` parser, a text stays one where strings are allowed first or no type is given; `null` and `None`
    are null where that is allowed; objects and lists may be written in Python's way. Unlike there, a boolean that is neither
    true nor false stays a text, and running the call reports it.

    Args:
        text: as the model wrote it.
        types: those of `property_types`.
    """
    if text.strip().lower() in ("null", "none") and types and ("null" in types or "string" not in types):
        return None
    for kind in types:
        if kind == "string":
            return text
        reader = _READERS.get(kind)
        if reader is not None and (value := reader(text.strip())) is not None:
            return value
    return text


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> list[str]:
    """The types that a schema allows, in the order in which it names them; each of its references is followed once."""
    if not isinstance(schema, Mapping):
        return []
    kind = schema.get("type")
    if isinstance(kind, str | list):
        kinds = [json_type(name) for name in ([kind] if isinstance(kind, str) else kind) if isinstance(name, str)]
        return [*kinds, "null"] if schema.get("nullable") is True else kinds
    if isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return []
        seen.add(reference)
        return _types(at_reference(reference, root), root, seen)
    for choice in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(choice), list):
            return [option_kind for option in options for option_kind in _types(option, root, seen)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [_KINDS.get(type(value), "null") for value in values] if isinstance(values, list) else []


def _integer(text: str) -> int | None:
    value = _number(text)
    return value if isinstance(value, int) else None


def _number(text: str) -> int | float | None:
    """Whole numbers as such, however they are written."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    if value.is_integer() and abs(value) < _MOST_EXACT:
        return int(value)
    return value if math.isfinite(value) else None


def _container(kind: type[Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        """JSON, or a literal of Python's; either may be escaped as in a JSON string, with its quotes or without."""
        value = _loaded(text)
        if value is None:
            with suppress(ValueError, RecursionError):
                value = json.loads(f'"{text}"', strict=False)
        value = _loaded(value) if isinstance(value, str) else value
        return value if isinstance(value, kind) else None

    return read


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False, object_pairs_hook=distinct)
    except (ValueError, RecursionError):
        return literal(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: {"true": True, "false": False}.get(text.lower()),
    "array": _container(list),
    "object": _container(dict),
}
