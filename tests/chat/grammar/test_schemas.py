"""Schemas lose what constrains nothing; what no grammar can enforce is refused, or left out where it is checked later."""

import json
from typing import Any

import pytest

from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.grammar.schemas import prepared, source_of
from jinfercept.chat.parsers.tool_call_format import Rules
from jinfercept.errors import RequestError
from jinfercept.structured_outputs import StructuredOutputsParams
from jinfercept.values import strict_json


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": 1e400}', '{"a": [-1E+999]}', "[1", "'a'"])
def test_what_json_cannot_write_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"no finite number|Expecting"):
        strict_json(text)


def test_json_is_read_as_the_standard_library_reads_it() -> None:
    text = '{"a": [1, -2.5e3, 1e-400, null, true, "NaN"]}'
    assert strict_json(text) == json.loads(text)


TEXT: Any = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": TEXT},
        {"propertyNames": True},
        {"format": "int64"},
        {"format": "something"},
        {"uniqueItems": False},
        {"maximum": 1e30},
        {"title": "a", "description": "b", "default": 1, "examples": [1], "deprecated": True, "$comment": "c"},
    ],
    ids=str,
)
@pytest.mark.parametrize("lenient", [False, True])
def test_what_constrains_nothing_is_dropped_at_any_depth(schema: Any, lenient: bool) -> None:
    within, plain = (
        {"type": "object", "properties": {"description": {"type": "array", "items": {"anyOf": [TEXT, part]}}}}
        for part in (schema, {})
    )
    assert prepared(within, lenient) == plain


def test_values_names_and_constraints_stay() -> None:
    schema = {
        "$defs": {"title": {"const": {"description": "x"}}},
        "properties": {"default": {"enum": [{"title": "y"}]}, "format": {"type": "string", "format": "date"}},
        "patternProperties": {"^x": {"$ref": "#/$defs/title"}},
        "required": ["default", "format"],
        "additionalProperties": False,
        "minProperties": 1,
        "maximum": 100,
    }
    assert prepared(schema) == schema
    assert prepared(schema, lenient=True) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"type": "string", "format": "idn-email"},
        {"propertyNames": {"pattern": "^a"}},
        {"contains": TEXT},
        {"dependentRequired": {"a": ["b"]}},
        {"type": "integer", "minimum": 10**25},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": r"(a)\1"},
        {"type": "object", "minProperties": 1, "properties": {"a": {}}},
        {"not": TEXT},
        {"if": {}, "then": TEXT},
    ],
    ids=str,
)
def test_what_only_a_validator_can_check_is_left_to_it_or_refused(byte_grammars: Grammars, schema: Any) -> None:
    whole = {"type": "object", "properties": {"x/y": {"type": "array", "items": schema}}}
    rules = Rules()
    byte_grammars.compile(rules.text(rules.json(prepared(whole, lenient=True))))
    with pytest.raises(RequestError, match=r"structured_outputs\.json cannot be enforced"):
        byte_grammars.compile(StructuredOutputsParams(json=whole))


def test_formats_without_end_have_a_length() -> None:
    assert prepared({"anyOf": [{"format": "email"}]}) == {"anyOf": [{"format": "email", "maxLength": 320}]}
    assert prepared({"format": "email", "maxLength": 9}) == {"format": "email", "maxLength": 9}


def test_types_of_tools_may_have_other_languages_names() -> None:
    schema = {"type": ["float", "None"], "items": {"type": "dict"}}
    assert prepared(schema, lenient=True) == {"type": ["number", "null"], "items": {"type": "object"}}
    assert prepared(schema) == schema


def test_annotations_do_not_count_against_the_limit() -> None:
    long: Any = {"type": "object", "description": "x" * 40_000, "properties": {"a": TEXT | {"title": "y" * 40_000}}}
    assert source_of(StructuredOutputsParams(json=long)) == source_of(StructuredOutputsParams(json=prepared(long)))
    assert len(source_of(StructuredOutputsParams(json=long))[1]) < 100
