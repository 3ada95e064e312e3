"""The form of a request's text: a JSON schema, any JSON object, a regular expression, a list of choices, or a grammar.

Checks how it is given; compiles nothing and imports nothing heavy.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from re import _parser  # the syntax tree has no public reader  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from typing import Any, final
from urllib.parse import unquote

from jinfercept.errors import RequestError, shown

KINDS = ("json", "json_object", "regex", "choice", "grammar")

JSON_SPACE = r" |\n[ \t]{0,20}"
"""White space between the parts of a JSON value. Without a bound small models write blanks until they are cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that the generated text must match, from its first token to its end. Names as in vLLM; exactly one is given.

    Tokens that tools return are no part of that text: a call may pause it anywhere, and it continues afterwards. So where the
    model is to call while it is constrained, what is given here has to allow the call's own text in the places meant for it, as
    in `start: ("<now>" "</now>")? answer`. Where a call is the end of the matched text, or is found at an end-of-text token (as
    in the models' own formats), the text begins anew after it: a grammar says what one turn is, `start: calls | answer`.

    Attributes:
        json: a JSON schema, as text or as what `json.loads` makes of it; `oneOf` is taken as `anyOf`, and annotations and
            formats that JSON Schema does not know are left out (`SchemaReduction`). White space between the
            parts of a value is at most a blank, or a new line and twenty blanks or tabs, so that no model writes it for ever.
        json_object: any JSON object.
        regex: a regular expression for the whole text, in the Rust crate's syntax: no look-around, no back-references.
        choice: texts, of which the output is one.
        grammar: a grammar in llguidance's variant of Lark (`start: …`), or GBNF (`root ::= …`).

    Raises:
        RequestError: none is given, several are, or one is of the wrong kind. What they say is checked when they are compiled.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        kinds = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(kinds) != 1:
            raise RequestError(
                "structured outputs take exactly one kind of constraint",
                got=", ".join(kinds) or "none",
                fix=f"give one of {', '.join(KINDS)}",
            )
        self._check(kinds[0], getattr(self, kinds[0]))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))

    def _check(self, kind: str, value: object) -> None:
        match kind:
            case "json":
                good, fix = isinstance(value, str | Mapping), "give a JSON schema as text or as a dict"
            case "json_object":
                good, fix = value is True, "True, or leave it out"
            case "choice":
                good = isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)
                good, fix = good and bool(value), "give a list of texts that are not empty"
            case _:
                good, fix = isinstance(value, str) and bool(value), "give a text that is not empty"
        if not good:
            raise RequestError(f"structured_outputs.{kind} has the wrong type", got=shown(value), fix=fix)

    @property
    def source(self) -> tuple[str, str]:
        """The kind of constraint that is given, and its text: equal for equal constraints.

        Raises:
            RequestError: the schema is not JSON.
        """
        if self.json is not None:
            return "json", _schema_text(self.json)
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice, ensure_ascii=False)
        return ("regex", self.regex) if self.regex is not None else ("grammar", self.grammar or "")


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    """The order of properties is the order in which they are written: it stays."""
    try:
        parsed = json.loads(schema, parse_constant=_refuse) if isinstance(schema, str) else schema
        reduced = SchemaReduction(checked_later=False).reduce(parsed)
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
_TYPE_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "long", "short", "uint", "int32", "int64", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("float", "double", "num", "decimal", "float32", "float64"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("arr", "list", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("none", "nonetype"), "null"),
}
"""Names that other languages have for JSON's types, and schemas that were written by hand."""


def json_type(name: str) -> str:
    """JSON's name for a type, also of `List[int]` or `dict[str, Any]`."""
    plain = name.split("[")[0].split("<")[0].strip().lower()
    return _TYPE_NAMES.get(plain, plain)


def at_reference(reference: str, root: Any) -> Any:
    """The part of a schema that a reference into it points to, such as `#/$defs/name`; None if there is none."""
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = dict(zip(map(str, range(len(root))), root, strict=True)).get(key)
        else:
            root = root.get(key) if isinstance(root, Mapping) else None
    return root if reference.startswith("#") else None


@final
@dataclass(slots=True)
class SchemaReduction:
    """One schema while it is reduced.

    Attributes:
        checked_later: a validator sees the whole schema once the value is there.
        unenforced: places of the constraints that were left to it; a `oneOf` is among them unless a discriminator tells
            its options apart.
    """

    checked_later: bool
    unenforced: list[str] = field(default_factory=list[str])

    def reduce(self, schema: Any, place: str = "#") -> Any:
        """The schema without these keywords.

        Raises:
            RequestError: a constraint can be neither enforced nor checked later.
        """
        if not isinstance(schema, Mapping):
            return schema
        if "patternProperties" in schema:
            schema = _with_listed_names(schema, f"{place}/patternProperties", self.checked_later)
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
                self.checked_later and key == "minProperties" and value > 1 + len({*schema.get("required", ())})
            ):  # in a call a grammar lets names repeat
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


def _with_listed_names(schema: Mapping[str, Any], at: str, checked_later: bool) -> Mapping[str, Any]:
    """The same schema with properties in place of patterns that match few names: a grammar writes each property once."""
    patterns = schema["patternProperties"]
    closed = schema.get("additionalProperties", schema.get("unevaluatedProperties")) is False
    if not closed or not isinstance(patterns, Mapping):  # an open object has always another name
        return schema
    properties, others = {**schema.get("properties", {})}, dict[str, Any]()
    for pattern, inner in patterns.items():
        try:
            names = names_of(pattern)
        except OverflowError:
            if not checked_later:
                raise RequestError(
                    "the names that a pattern of the JSON schema matches cannot be kept distinct",
                    got=f"{at}/{pattern:.80}, whose names have a greatest length and cannot be listed (at most {MAX_NAMES})",
                    fix="list the names in properties, or leave the end of the pattern open",
                ) from None
            names = None
        if names is None:
            others[pattern] = inner
        for name in names or ():
            both = name in properties and properties[name] != inner
            properties[name] = {"allOf": [properties[name], inner]} if both else inner
    if others == patterns:
        return schema
    whole = {**schema, "properties": properties, "patternProperties": others}
    if others:
        return whole
    del whole["patternProperties"]
    total, least = len(properties), schema.get("minProperties", 0)
    if least > total:
        return {**schema, "maxProperties": total}
    if least == total:
        whole |= {"required": [*properties, *({*schema.get("required", ())} - {*properties})], "minProperties": 0}
    if schema.get("maxProperties", math.inf) >= total:
        whole.pop("maxProperties", None)
    return whole


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
    """Whether only a validator can check a keyword that constrains something."""
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
    """The largest number of this type that readers of JSON keep."""
    return 10**18 if schema.get("type") in ("integer", ["integer"]) else 10**15


MAX_NAMES = 64
"""Names that are listed for a pattern: each of them gets the pattern's schema."""
_MAX_CHARS = 256
_CATEGORIES = {
    "CATEGORY_DIGIT": "0123456789",
    "CATEGORY_WORD": "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz",
}
_UNICODE_CLASS = re.compile(r"(?<!\\)((?:\\\\)*)\\[pP](?:\{[^}]*\}|\w)")
_NAMED_GROUP = re.compile(r"\(\?<(?=\w)")


def names_of(pattern: str) -> list[str] | None:
    """All names that match; None where their length has no bound, or for a pattern that only llguidance can judge.

    Raises:
        OverflowError: the names have a bound, but are more than `MAX_NAMES`, or longer than names are listed.
    """
    python_pattern = _UNICODE_CLASS.sub(r"\1\\W", pattern)  # \W: as many characters
    try:
        parsed: Any = _parser.parse(_NAMED_GROUP.sub("(?P<", python_pattern))
        most = parsed.getwidth()[1]
        if most >= _parser.MAXREPEAT or not (_is_anchored(parsed, 0) and _is_anchored(parsed, -1)):
            return None
        if most > _MAX_CHARS or parsed.state.flags & re.IGNORECASE:
            raise OverflowError
        return _texts(parsed)
    except (re.error, RecursionError):
        return None


def _is_anchored(parsed: Any, end: int) -> bool:
    if not parsed:
        return False
    kind, argument = parsed[end]
    match str(kind):
        case "AT":
            return str(argument).startswith(("AT_BEGINNING", "AT_END")[end])
        case "SUBPATTERN":
            return _is_anchored(argument[-1], end)
        case "BRANCH":
            return all(_is_anchored(option, end) for option in argument[1])
        case _:
            return False


def _texts(parsed: Any) -> list[str]:
    texts = [""]
    for kind, argument in parsed:
        texts = _limited(text + more for more in _texts_of(str(kind), argument) for text in texts)
    return texts


def _texts_of(kind: str, argument: Any) -> list[str]:
    match kind:
        case "AT" if str(argument).startswith(("AT_BEGINNING", "AT_END")):
            return [""]
        case "AT" | "ASSERT" | "ASSERT_NOT" | "GROUPREF":
            raise re.error("llguidance refuses it")
        case "LITERAL":
            return [chr(argument)]
        case "RANGE":
            return _limited(map(chr, range(argument[0], argument[1] + 1)))
        case "CATEGORY" if str(argument) in _CATEGORIES:
            return [*_CATEGORIES[str(argument)]]
        case "IN":
            return _limited(char for part in argument for char in _texts_of(str(part[0]), part[1]))
        case "BRANCH":
            return _limited(text for option in argument[1] for text in _texts(option))
        case "SUBPATTERN" if not argument[1]:  # flags
            return _texts(argument[-1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, repeated = argument
            texts, parts = [""], _texts(repeated)
            for count in range(most):
                options = parts if count < least else ["", *parts]
                earlier, texts = texts, _limited(text + part for part in options for text in texts)
                if texts == earlier:  # the parts are empty
                    break
            return texts
        case _:  # such as any character
            raise OverflowError


def _limited(texts: Iterable[str]) -> list[str]:
    distinct = dict[str, None]()
    for text in texts:
        distinct[text] = None
        if len(distinct) > MAX_NAMES:
            raise OverflowError
    return [*distinct]
