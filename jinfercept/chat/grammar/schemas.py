"""Prepares JSON schemas for llguidance, and writes the text of a constraint to compile.

llguidance itself refuses keywords that no grammar can enforce, or ignores them where its option `lenient` says so.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.structured_outputs import StructuredOutputsParams, json_type


def source_of(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the kind of a constraint and its text, which is equal for equal constraints.

    Raises `RequestError` if the schema is not JSON.
    """
    if params.json is not None:
        return "json", _schema_text(params.json)
    if params.json_object:
        return "json", '{"type": "object"}'
    if params.choice is not None:
        return "choice", json.dumps(params.choice, ensure_ascii=False)
    return ("regex", params.regex) if params.regex is not None else ("grammar", params.grammar or "")


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    try:
        parsed = json.loads(schema, parse_constant=_refuse) if isinstance(schema, str) else schema
        # keys are not sorted: properties are written in the order of the schema
        return json.dumps(prepared(parsed), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        what = "structured_outputs.json is nested too deeply"
        raise RequestError(what, got=str(error), fix="give a flatter schema") from error
    except (ValueError, TypeError) as error:
        raise RequestError(
            "structured_outputs.json is not JSON", got=f"{type(error).__name__}: {error}", fix="give a JSON schema"
        ) from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_ANNOTATIONS = {
    *("$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "strict", "title"),
    *("markdownDescription", "writeOnly"),
}
_SCHEMAS_BY_NAME = {"$defs", "definitions", "patternProperties", "properties"}
_SCHEMAS = {"additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"}
_FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"),
    # no grammar holds these formats of JSON Schema
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
}
"""Any other format is unknown, and constrains nothing."""
_MOST_CHARS = {"date-time": 35, "duration": 64, "email": 320, "hostname": 253, "time": 24, "uri": 2048}
"""Characters of the formats that are else without end: RFC 3339 with nanoseconds, numbers of nine digits, RFC 3696, RFC 1123,
and the URLs that are taken everywhere."""
_SHORT_NUMBERS = {"pattern": "^[0-9]{0,9}([^0-9]+[0-9]{0,9})*$"}
_ANY_NAME = (True, {}, {"type": "string"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BEYOND_REGEX = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(<?[=!])|\\[1-9])")


def prepared(schema: Any, lenient: bool = False) -> Any:
    """Copy a schema without annotations and constraints that exclude nothing, and bound the length of its formats.

    Args:
        lenient: a validator sees the value later, so constraints with which llguidance would refuse the schema are left out,
            and types may have the names of other languages.
    """
    if isinstance(schema, list):
        return [prepared(part, lenient) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copied: dict[str, Any] = {}
    for key, value in schema.items():
        if _excludes_nothing(key, value, schema) or (lenient and _is_refused(key, value, schema)):
            continue
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            copied[key] = {name: prepared(part, lenient) for name, part in value.items()}
        elif key == "type" and lenient:
            names = [json_type(name) if isinstance(name, str) else name for name in _listed(value)]
            copied[key] = names if isinstance(value, list) else names[0]
        else:
            copied[key] = prepared(value, lenient) if key in _SCHEMAS else value
    name = schema.get("format")
    if name in _MOST_CHARS and "pattern" not in schema:  # llguidance cannot join both with a length
        numbers = _SHORT_NUMBERS if name in ("date-time", "duration", "time") else {}
        copied = {"maxLength": _MOST_CHARS[name], **numbers} | copied
    return copied


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _excludes_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in _ANY_NAME
        case _:
            return key in _ANNOTATIONS or (_is_huge(key, value, schema) and (value > 0) == (key in _UPPER))


def _is_refused(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "pattern":
        return isinstance(value, str) and bool(_BEYOND_REGEX.search(value))
    return _is_huge(key, value, schema)


def _is_huge(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    # beyond the largest number of this type that JSON readers keep
    largest = 10**18 if schema.get("type") in ("integer", ["integer"]) else 10**15
    return key in _LOWER + _UPPER and isinstance(value, int | float) and abs(value) > largest
