"""JSON schemas of tools' arguments, prepared for grammars of calls.

A grammar may allow less than a schema (nothing undeclared, no number that is too large to read), and never more.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jinfercept.errors import RequestError, shown
from jinfercept.values.enforceable_schema import at_reference

_ANNOTATIONS = {
    *("$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "strict", "title"),
    "writeOnly",
}
_DEFINITIONS = {"$defs", "definitions"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}
_TEXT_BOUNDS = {"minLength", "maxLength", "pattern"}
_APPLIED = {"allOf", "anyOf", "oneOf"}
_MOST_ALTERNATIVES = 32
_LARGEST = {"number": 10**15, "integer": 10**18}
_SCHEMAS_BY_NAME = {*_DEFINITIONS, "properties", "patternProperties"}
_ANYTHING = "jinfercept-anything"
_REFERENCE = {"$ref": f"#/$defs/{_ANYTHING}"}
_ANY_VALUE = {"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null", "array", "object")]}
_COMBINING = {"$ref", "allOf", "anyOf", "else", "if", "oneOf", "then"}


def constraints(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that constrain a value."""
    return {*schema} - _ANNOTATIONS - _DEFINITIONS


def arguments_schema(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of all arguments: an object of the declared properties only, unless the schema explicitly allows more.

    Args:
        schema: as it was declared; an empty one takes no arguments.

    Raises:
        RequestError: the schema is not one of an object.
    """
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"the arguments of tool {name!r} are no object",
            got=shown(schema["type"]),
            fix='declare them as {"type": "object", "properties": {…}}',
        )
    keywords = constraints(schema)
    if keywords and ("properties" not in keywords or keywords & {*_COMBINING, "additionalProperties"}):
        return {"type": "object", **schema}
    return {"properties": {}, **schema, "type": "object", "additionalProperties": False}


class Argument(NamedTuple):
    """An argument: its name, its schema with the definitions that it may refer to, and whether it is required."""

    name: str
    schema: Mapping[str, Any]
    needed: bool


def named_arguments(name: str, schema: Mapping[str, Any]) -> list[list[Argument]]:
    """The arguments, for formats that write them one by one: a list for each alternative that the schema combines.

    Undeclared arguments are never written.

    Raises:
        RequestError: the schema has other constraints, or too many alternatives.
    """
    whole = arguments_schema(name, schema)
    definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
    alternatives = _alternatives(name, whole, whole, ())
    writable = [option for option in alternatives if option.needed <= {*option.properties}]
    if not writable:
        raise _not_one_by_one(name, f"properties: {whole.get('properties')!r:.80}, required: {whole.get('required')}")
    return [
        [Argument(key, inner(definitions, value), key in needed) for key, value in properties.items()]
        for properties, needed, _ in writable
    ]


class _Alternative(NamedTuple):
    """Properties that an object may have, those that it needs, and the schema of all others."""

    properties: Mapping[str, Any]
    needed: frozenset[str]
    others: Any


def _alternatives(name: str, schema: Any, root: Mapping[str, Any], references: tuple[Any, ...]) -> list[_Alternative]:
    """What an object of a schema may be; `references` were followed on the way here."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping) or "object" not in str(schema.get("type", "object")):
        return []
    extra = constraints(schema) - {"type", "properties", "required", "additionalProperties", "$ref", *_APPLIED}
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if extra or not isinstance(properties, Mapping) or not isinstance(needed, list):
        raise _not_one_by_one(name, ", ".join(sorted(extra)) or f"properties: {properties!r:.80}, required: {needed}")
    options = [_Alternative(properties, frozenset(needed), schema.get("additionalProperties", True))]
    applied: list[list[Any]] = [[part] for part in schema.get("allOf", [])]
    applied += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    if (reference := schema.get("$ref")) is not None:
        if reference in references:
            raise _not_one_by_one(name, f"{reference}, which refers to itself")
        references = (*references, reference)
        applied.append([at_reference(str(reference), root)])
    for parts in applied:
        within = [option for part in parts for option in _alternatives(name, part, root, references)]
        if len(options) * len(within) > _MOST_ALTERNATIVES:
            raise _not_one_by_one(name, f"more than {_MOST_ALTERNATIVES} alternatives")
        options = [_joined(option, other) for option in options for other in within]
    return options


def _joined(first: _Alternative, second: _Alternative) -> _Alternative:
    properties: dict[str, Any] = {}
    for key in {**first.properties, **second.properties}:
        schema = _both(*(side.properties.get(key, side.others) for side in (first, second)))
        if schema is not False:
            properties[key] = schema
    return _Alternative(properties, first.needed | second.needed, _both(first.others, second.others))


def _both(first: Any, second: Any) -> Any:
    """A schema of the values that two allow: one without `allOf` where they say simple things that differ; False for none."""
    if first == second or second in (True, {}):
        return first
    if first in (True, {}):
        return second
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return False
    values = [part.get("enum", [part["const"]] if "const" in part else None) for part in (first, second)]
    if all(isinstance(listed, list) for listed in values):
        common = [value for value in values[0] if value in values[1]]
        first, second = ({key: part[key] for key in {*part} - {"enum", "const"}} for part in (first, second))
        return _both({"enum": common}, _both(first, second)) if common else False
    same = all(first[key] == second[key] for key in {*first} & {*second})
    simple = constraints(first) | constraints(second) <= {"type", "format", *_BOUNDS, *_TEXT_BOUNDS}
    return {**first, **second} if same and simple else {"allOf": [first, second]}


def _not_one_by_one(name: str, got: str) -> RequestError:
    return RequestError(
        f"the arguments of tool {name!r} cannot be written one by one",
        got=got,
        fix='declare all of them in "properties", say which are "required", and combine such schemas'
        ' with "$ref", "allOf", "anyOf" and "oneOf" only',
    )


def bounded(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A whole schema with bounds on its numbers: JSON readers take larger ones for infinite, or refuse them."""
    whole = _bounded(schema)
    return {**whole, "$defs": {**whole.get("$defs", {}), _ANYTHING: _bounded(_ANY_VALUE)}}


def _bounded(schema: Any) -> Any:
    if schema is True or (isinstance(schema, Mapping) and not constraints(schema)):
        return {**(schema if isinstance(schema, Mapping) else {}), **_REFERENCE}
    if not isinstance(schema, Mapping):
        return schema
    within = {key: _bounded_within(key, value) for key, value in schema.items()}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    sizes = [_LARGEST[kind] for kind in kinds if kind in ("number", "integer")]
    if sizes and not _BOUNDS & {*schema}:
        within = {"minimum": -min(sizes), "maximum": min(sizes), **within}
    if not {*_COMBINING, "enum", "const"} & {*schema}:
        within = ({"items": _REFERENCE} if "array" in kinds else {}) | within
        within = ({"additionalProperties": _REFERENCE} if "object" in kinds else {}) | within
    return within


def _bounded_within(key: str, value: Any) -> Any:
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _bounded(part) for name, part in value.items()}
    if key in ("anyOf", "prefixItems") and isinstance(value, list):
        return [_bounded(part) for part in value]
    return _bounded(value) if key in ("items", "additionalProperties") else value


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose top-level references are followed, with the definitions that it may refer to.

    Raises:
        RequestError: a reference leads nowhere, or in a circle.
    """
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    seen: set[str] = set()
    while constraints(schema) == {"$ref"}:
        reference = schema["$ref"]
        target = at_reference(str(reference), definitions)
        if reference in seen or not isinstance(target, Mapping):
            raise RequestError(
                "a schema refers to nothing",
                got=shown(reference),
                fix='give what it refers to in the "$defs" of the tool\'s parameters',
            )
        seen.add(reference)
        schema = {**definitions, **target}
    return schema


def inner(schema: Mapping[str, Any], within: Any) -> Mapping[str, Any]:
    """A schema that stands within another, with the definitions of the outer one."""
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    return {**definitions, **(within if isinstance(within, Mapping) else {} if within is True else {"not": {}})}
