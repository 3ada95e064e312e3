"""Converts values that a model wrote as plain text to the types of a JSON schema."""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinfercept.chat.parsers.json_calls import distinct
from jinfercept.chat.parsers.python_calls import literal
from jinfercept.structured_outputs import at_reference, json_type

_MOST_EXACT = 2**53
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_SLOW_PATTERN = re.compile(r"\)[*+{]|\\[1-9]|\(\?[^:]|([*+?}].*){4}", re.DOTALL)
"""Patterns that `re` may take exponential time for."""
_MOST_NAME_CHARS = 64
"""Limit of a name that is matched with a pattern: three repetitions take its third power in steps."""


def property_types(schema: Mapping[str, Any], name: str) -> list[str]:
    """List the JSON types that an object's schema allows for a property, in its order; empty if it names none."""
    members: dict[bool, list[Any]] = {False: [], True: []}
    for part, is_option in _parts(schema, schema):
        properties, patterns = _mapping(part.get("properties")), _mapping(part.get("patternProperties"))
        declared = [properties[name]] if name in properties else []
        declared += [inner for pattern, inner in patterns.items() if _may_match(pattern, name)]
        others = part.get("additionalProperties", part.get("unevaluatedProperties"))
        members[is_option or not declared] += declared or [others]
    parts = [*_parts({"allOf": members[False], "anyOf": members[True]}, schema)]
    options = dict.fromkeys(kind for part, is_option in parts if is_option for kind in _own_types(part))
    kinds = _common([*(_own_types(part) for part, is_option in parts if not is_option), [*options]])
    return kinds + (["null"] if any(part.get("nullable") is True for part, _ in parts) else [])


def may_have(schema: Mapping[str, Any], name: str) -> bool:
    """Whether an object may have a property. Any is possible if the schema declares no properties, or allows others."""
    declares = False
    for part, _ in _parts(schema, schema):
        reference, properties = part.get("$ref"), part.get("properties")
        outside = isinstance(reference, str) and at_reference(reference, schema) is None
        if outside or part.get("additionalProperties") or part.get("patternProperties"):
            return True
        if isinstance(properties, Mapping):
            declares = True
            if name in properties:
                return True
    return not declares


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


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    # the schema and those that it combines for the same value, each with whether it is one of several options
    waiting, seen = deque([(schema, False)]), set[str]()
    while waiting:
        part, is_option = waiting.popleft()
        if not isinstance(part, Mapping):
            continue
        yield part, is_option
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append((at_reference(reference, root), is_option))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(listed := part.get(key), list):
                waiting += ((inner, is_option or key != "allOf") for inner in listed)
        inner_parts = [part.get(key) for key in ("if", "then", "else")]
        for key in ("dependentSchemas", "dependencies"):
            inner_parts += _mapping(part.get(key)).values()
        waiting += ((inner, True) for inner in inner_parts)


def _may_match(pattern: str, name: str) -> bool:
    if len(name) > _MOST_NAME_CHARS or _SLOW_PATTERN.search(pattern):
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return True


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    value_kinds = [_KINDS.get(type(value), "null") for value in values] if isinstance(values, list) else []
    return _common([[json_type(name) for name in kinds if isinstance(name, str)], [*dict.fromkeys(value_kinds)]])


def _common(results: Iterable[list[str]]) -> list[str]:
    common: list[str] = []
    for kinds in filter(None, results):
        # empty lists do not restrict; if no type is in all lists, the first list counts
        both = [kind for kind in common if kind in kinds or (kind == "integer" and "number" in kinds)]
        both += [kind for kind in kinds if kind == "integer" and kind not in common and "number" in common]
        common = both or common or kinds
    return common


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
