"""JSON schemas of tools' arguments, prepared for grammars of calls.

A grammar may allow less than a schema (nothing undeclared, no number that is too large to read), and never more.
"""

from collections.abc import Mapping
from typing import Any

from jinfercept.errors import RequestError, shown
from jinfercept.values.enforceable_schema import at_reference

_ANNOTATIONS = {
    *("$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "strict", "title"),
    "writeOnly",
}
_DEFINITIONS = {"$defs", "definitions"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}
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


def named_arguments(name: str, schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required of every argument, for formats that write them one by one.

    Each schema has the definitions that it may refer to. Undeclared arguments are never written.

    Raises:
        RequestError: the schema has other constraints.
    """
    whole = arguments_schema(name, schema)
    extra = constraints(whole) - {"type", "properties", "required", "additionalProperties"}
    properties, needed = whole.get("properties", {}), whole.get("required", [])
    if extra or not isinstance(properties, Mapping) or not isinstance(needed, list) or {*needed} - {*properties}:
        raise RequestError(
            f"the arguments of tool {name!r} cannot be written one by one",
            got=", ".join(sorted(extra)) or f"properties: {properties!r:.80}, required: {needed}",
            fix='declare all of them in "properties" and say no more than which are "required"',
        )
    definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
    return [(key, inner(definitions, value), key in needed) for key, value in properties.items()]


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
