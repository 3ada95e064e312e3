"""Converts values that a model wrote as plain text to the types of a JSON schema."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinfercept.chat.parsers.json_calls import distinct
from jinfercept.chat.parsers.python_calls import literal
from jinfercept.structured_outputs import at_reference, json_type

_MOST_EXACT = 2**53
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def property_types(schema: Mapping[str, Any], name: str) -> list[str]:
    """List the JSON types that an object's schema names for a property, in its order; empty if it names none."""
    parts = [*_parts(schema, schema)]
    declared = [part["properties"][name] for part in parts if name in _properties(part)]
    declared = declared or [part.get("additionalProperties") for part in parts]
    kinds = (kind for inner in declared for part in _parts(inner, schema) for kind in _own_types(part))
    return [*dict.fromkeys(kinds)]


def may_have(schema: Mapping[str, Any], name: str) -> bool:
    """Whether an object may have a property. Any is possible if the schema declares no properties, or allows others."""
    parts = [*_parts(schema, schema)]
    return any(name in _properties(part) or part.get("additionalProperties") for part in parts) or not any(
        map(_properties, parts)
    )


def value_of(text: str, types: Sequence[str]) -> Any:
    """Convert a text to the first allowed type that it can be, or leave it as a string.

    If strings are allowed too, the types after them need text that is JSON. `null` and `None` are null where null is allowed.
    Objects and lists may be written in Python's way. Unlike in vLLM's `qwen3_coder` parser, a boolean that is neither true nor
    false stays a text, and running the call reports it.

    Args:
        text: as the model wrote it.
        types: from `property_types`; empty: a string.
    """
    if text.strip().lower() in ("null", "none") and types and ("null" in types or "string" not in types):
        return None
    for kind in types:
        if kind == "string":
            return _json_of(text, types)
        reader = _READERS.get(kind)
        if reader is not None and (value := reader(text.strip())) is not None:
            return value
    return text


def _json_of(text: str, types: Sequence[str]) -> Any:
    with suppress(ValueError, RecursionError):
        value = json.loads(text, object_pairs_hook=distinct)
        kind = _KINDS.get(type(value), "null")
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
            return value
    return text


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    # the schema and those that it refers to or combines for the same value
    waiting, seen = [schema], set[str]()
    for part in waiting:
        if not isinstance(part, Mapping):
            continue
        yield part
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(at_reference(reference, root))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(listed := part.get(key), list):
                waiting += listed


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    named = [json_type(name) for name in kinds if isinstance(name, str)]
    if not named and isinstance(values, list):
        named = [_KINDS.get(type(value), "null") for value in values]
    return named + (["null"] if schema.get("nullable") is True else [])


def _integer(text: str) -> int | None:
    value = _number(text)
    return value if isinstance(value, int) else None


def _number(text: str) -> int | float | None:
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
        """JSON, or a literal of Python's; either may be within a JSON string."""
        value = _loaded(text)
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
