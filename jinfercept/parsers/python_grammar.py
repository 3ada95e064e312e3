"""What a JSON schema allows, as grammar of Python literals. Knows no calls.

What has no form of its own here is written as JSON, which `python_calls` reads too.
"""

import json
from collections.abc import Mapping
from typing import Any

from jinfercept.parsers.call_schemas import constraints, inner
from jinfercept.parsers.lark import Rules, one_of, pattern, quoted

_STRING = r""""(\\["'\\nrt]|[^"\\\x00-\x1F\x7F])*"|'(\\["'\\nrt]|[^'\\\x00-\x1F\x7F])*'"""
_PLAIN = {"string": _STRING, "boolean": "True|False", "null": "None"}


def python_value(rules: Rules, schema: Mapping[str, Any]) -> str:
    """The name of a rule.

    Args:
        rules: it is put into.
        schema: of the value, with the definitions that it refers to.
    """
    said = constraints(schema)
    kind = schema.get("type")
    if said == {"$ref"}:
        return _referred(rules, schema)
    if "const" in said or "enum" in said:
        values = [schema["const"]] if "const" in said else schema["enum"]
        plain = len(said) == 1 or (said <= {"const", "enum", "type"} and kind == "string" and _all_texts(values))
        if plain and values:
            return rules.terminal(one_of(text for value in values for text in _literals(value)))
        return rules.json(schema)
    if said == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
        return rules.rule(one_of(python_value(rules, inner(schema, option)) for option in schema["anyOf"]))
    if isinstance(kind, list) and kind:
        return rules.rule(one_of(python_value(rules, {**schema, "type": one}) for one in kind))
    if said == {"type"} and kind in _PLAIN:
        return rules.terminal(pattern(_PLAIN[kind]))
    if kind == "array" and "items" in said and said <= {"type", "items", "minItems", "maxItems"}:
        return _list(rules, schema)
    if kind == "object" and {"additionalProperties", "properties"} <= said <= {
        *("type", "properties", "required", "additionalProperties"),
    }:
        return _dict(rules, schema)
    return rules.json(schema)


def _all_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _referred(rules: Rules, schema: Mapping[str, Any]) -> str:
    """A rule for each definition, once."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    key = json.dumps([schema["$ref"], definitions])
    if key not in rules.references:
        _, place, *steps = [*str(schema["$ref"]).split("/"), ""]
        found = definitions.get(place, {}).get(steps[0]) if len(steps) == 2 else None
        if not isinstance(found, Mapping):
            return rules.json(schema)
        rules.references[key] = name = rules.name()
        rules.define(name, python_value(rules, {**definitions, **found}))
    return rules.references[key]


def _list(rules: Rules, schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if not isinstance(least, int) or not isinstance(most, int | None) or (most is not None and most < max(1, least)):
        return rules.json(schema)
    item = python_value(rules, inner(schema, schema["items"]))
    more = f'(", " {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}' if most != 1 else ""
    return rules.rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')


def _dict(rules: Rules, schema: Mapping[str, Any]) -> str:
    properties, needed = schema["properties"], schema.get("required", [])
    if schema["additionalProperties"] is not False or not isinstance(needed, list) or {*needed} - {*properties}:
        return rules.json(schema)
    members = [
        (f'{one_of(_literals(key))} ": " {python_value(rules, inner(schema, value))}', key in needed)
        for key, value in properties.items()
    ]
    return rules.rule(f'"{{" {rules.listed(members, quoted(", "))} "}}"')


def _literals(value: Any) -> list[str]:
    """A value as Python writes it, and a text in both quotes."""
    texts = [repr(value)]
    if isinstance(value, str):
        texts.append(json.dumps(value, ensure_ascii=False))
    return [quoted(text) for text in texts]
