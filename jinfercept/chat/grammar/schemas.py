"""Reduces JSON schemas to the keywords that a grammar can enforce, and writes the text of a constraint to compile."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

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
        reduced = SchemaReduction(checked_later=False).reduce(parsed)
        # keys are not sorted: properties are written in the order of the schema
        return json.dumps(reduced, ensure_ascii=False, allow_nan=False)
    except RequestError as error:
        raise RequestError("structured_outputs.json cannot be enforced", got=error.got, fix=error.fix) from error
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise RequestError(
                "structured_outputs.json is nested too deeply", got=str(error), fix="give a flatter schema"
            ) from error
        raise RequestError(
            "structured_outputs.json is not JSON", got=f"{type(error).__name__}: {error}", fix="give a JSON schema"
        ) from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_ANNOTATIONS = {
    *("$comment", "default", "deprecated", "description", "example", "examples", "externalDocs", "readOnly", "title"),
    *("writeOnly", "xml", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "nullable"),
    "strict",
    *("markdownDescription", "enumDescriptions", "deprecationMessage", "errorMessage"),
}
_SCHEMAS_BY_NAME = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_SCHEMAS = {
    *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf"),
    *("prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
}
_ENFORCED_FORMATS = {*("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")}
_MOST_CHARS = {"date-time": 35, "duration": 64, "email": 320, "hostname": 253, "time": 24, "uri": 2048}
"""Characters of the formats that are else without end: RFC 3339 with nanoseconds, numbers of nine digits, RFC 3696, RFC 1123,
and the URLs that are taken everywhere."""
_SHORT_NUMBERS = {"pattern": "^[0-9]{0,9}([^0-9]+[0-9]{0,9})*$"}
_OTHER_FORMATS = {
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
}
"""Formats of JSON Schema that no grammar holds. Any other format is unknown, and constrains nothing."""
_CHECKABLE = {"contains", "dependentRequired", "maxContains", "minContains", "propertyNames", "uniqueItems"}
_UNENFORCEABLE = {
    *("$dynamicRef", "$recursiveRef", "dependencies", "dependentSchemas", "else", "if", "not", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
_ELSEWHERE = {
    *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "else", "if"),
    *("not", "oneOf", "then"),
}
"""Keywords whose schemas say which members of the same value are evaluated."""
_PLAIN = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
"""What keywords mean where no other schema evaluates members of the value."""
_COUNTS = {f"{bound}{what}" for bound in ("min", "max") for what in ("Contains", "Items", "Length", "Properties")}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BEYOND_REGEX = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(<?[=!])|\\[1-9])")


@final
@dataclass(slots=True)
class SchemaReduction:
    """The reduction of one schema."""

    checked_later: bool  # a validator sees the whole schema once the value is there
    # places of the constraints left to the validator; a `oneOf` is among them unless a discriminator tells its options apart
    unenforced: list[str] = field(default_factory=list[str])

    def reduce(self, schema: Any, place: str = "#") -> Any:
        """Return the schema without keywords that a grammar cannot enforce.

        Raises `RequestError` if a constraint can be neither enforced nor checked later.
        """
        if not isinstance(schema, Mapping):
            return schema
        reduced: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _ANNOTATIONS or _constrains_nothing(key, value, schema):
                continue
            at = f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}"
            if key in _PLAIN and not _ELSEWHERE & {*schema}:
                if _PLAIN[key] not in schema:
                    reduced[_PLAIN[key]] = self.reduce(value, at)
            elif key in _UNENFORCEABLE:
                raise _unenforceable(at, "Unimplemented keys")
            elif _is_beyond_grammars(key, value, schema) or (
                (self.checked_later or "patternProperties" in schema)
                and key == "minProperties"
                and value > 1 + len({*schema.get("required", ())})
            ):  # in a call, and where all names that match a pattern are there, names may come again
                if not self.checked_later:
                    raise _unenforceable(at, "Unimplemented keys" if key in _CHECKABLE else f"{value!r:.80}")
                self.unenforced.append(at)
            else:
                if key == "oneOf" and self.checked_later and "discriminator" not in schema:
                    self.unenforced.append(at)
                reduced |= self._member(key, value, at, schema)
        return reduced

    def _member(self, key: str, value: Any, at: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        if key == "type" and self.checked_later:
            if isinstance(value, list) and all(isinstance(name, str) for name in value):
                return {key: [json_type(name) for name in value]}
            return {key: json_type(value) if isinstance(value, str) else value}
        if key == "format" and value in _MOST_CHARS and "pattern" not in schema:  # llguidance cannot join all three
            return _bounded_format(value, schema)
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            return {key: int(value)}
        if key in _LOWER + _UPPER and _is_huge(value, schema):
            return {_LOWER[0] if key in _LOWER else _UPPER[0]: _largest(schema) * (-1 if key in _LOWER else 1)}
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {key: {name: self.reduce(inner, f"{at}/{name}") for name, inner in value.items()}}
        if key in _SCHEMAS and isinstance(value, list):
            return {key: [self.reduce(inner, f"{at}/{index}") for index, inner in enumerate(value)]}
        return {key: self.reduce(value, at) if key in _SCHEMAS else value}


def _bounded_format(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    numbers = _SHORT_NUMBERS if name in ("date-time", "duration", "time") else {}
    bounds = {"maxLength": _MOST_CHARS[name], **numbers}
    return {"format": name} | {key: bound for key, bound in bounds.items() if key not in schema}


def _unenforceable(at: str, why: str) -> RequestError:
    return RequestError("a constraint of the JSON schema cannot be enforced", got=f"{at}: {why}", fix="leave it out")


def _constrains_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in _ENFORCED_FORMATS | _OTHER_FORMATS
        case "uniqueItems":
            return value is False
        case "minItems" | "minLength" | "minProperties":
            return value == 0 and not isinstance(value, bool)
        case "minContains" | "maxContains" if "contains" not in schema:
            return True
        case "contains" | "minContains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "propertyNames":
            return _allows_texts(value)
        case "unevaluatedItems" | "unevaluatedProperties":
            return value is True or _is_empty(value)
        case "not":
            return value is False
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema or value is True or _is_empty(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, Mapping) and all(each in (True, []) or _is_empty(each) for each in value.values())
        case _:
            return False


def _counts_names(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", ())
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    counts = [schema[bound] for bound in ("minProperties", "maxProperties") if bound in schema]
    if closed and not required and max(counts) == 1:  # llguidance knows at least, at most and exactly one
        return False
    return isinstance(properties, Mapping) and isinstance(required, list | tuple) and bool({*properties} - {*required})


def _is_beyond_grammars(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        return value in _OTHER_FORMATS
    if key == "pattern":
        return isinstance(value, str) and bool(_BEYOND_REGEX.search(value))
    if key in ("minProperties", "maxProperties"):
        return _counts_names(schema)
    if key in _LOWER + _UPPER and _is_huge(value, schema):
        return (value > 0) == (key in _LOWER)
    return key in _CHECKABLE


def _is_empty(schema: Any) -> bool:
    return isinstance(schema, Mapping) and not {*schema} - _ANNOTATIONS


def _allows_texts(schema: Any) -> bool:
    if schema is True or _is_empty(schema):
        return True
    if not isinstance(schema, Mapping) or {*schema} - _ANNOTATIONS - {"type"}:
        return False
    kinds = schema.get("type")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _is_huge(value: Any, schema: Mapping[str, Any]) -> bool:
    return isinstance(value, int | float) and _largest(schema) < abs(value) < math.inf


def _largest(schema: Mapping[str, Any]) -> int:
    # the largest number of this type that JSON readers keep
    return 10**18 if schema.get("type") in ("integer", ["integer"]) else 10**15
