"""Schemas lose what constrains nothing and what is checked later; what remains unenforceable is named by its place."""

import json
from typing import Any

import pytest

from jinfercept.chat.grammar.schemas import SchemaReduction, source_of
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


def reduced(schema: Any, checked_later: bool = False) -> Any:
    reduction = SchemaReduction(checked_later)
    return reduction.reduce(schema), reduction.unenforced


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": TEXT},
        {"propertyNames": {"type": ["string", "null"], "description": "any"}},
        {"propertyNames": True},
        {"format": "int64"},
        {"format": "something"},
        {"uniqueItems": False},
        {"minItems": 0, "minLength": 0, "minProperties": 0},
        {"contains": TEXT, "minContains": 0},
        {"maxContains": 3},
        {"unevaluatedProperties": True, "unevaluatedItems": {}},
        {"if": {"not": {}}},
        {"then": TEXT},
        {"not": False},
        {"dependentRequired": {"a": []}},
        {"title": "a", "description": "b", "default": 1, "examples": [1], "deprecated": True, "$comment": "c"},
        {"contentEncoding": "base64", "nullable": True, "xml": {}, "discriminator": {}},
    ],
    ids=str,
)
def test_what_constrains_nothing_is_dropped_at_any_depth(schema: Any) -> None:
    for checked_later in (False, True):
        assert reduced(schema, checked_later) == ({}, [])
        within = {
            "type": "object",
            "properties": {"description": {"type": "array", "items": {"anyOf": [TEXT, schema]}}},
        }
        plain = {"type": "object", "properties": {"description": {"type": "array", "items": {"anyOf": [TEXT, {}]}}}}
        assert reduced(within, checked_later) == (plain, [])


def test_values_names_and_constraints_stay() -> None:
    schema = {
        "$defs": {"title": {"const": {"description": "x"}}},
        "properties": {"default": {"enum": [{"title": "y"}]}, "format": {"type": "string", "format": "date"}},
        "patternProperties": {"^x": {"$ref": "#/$defs/title"}},
        "required": ["default"],
        "additionalProperties": False,
        "minProperties": 1,
    }
    assert reduced({**schema, "required": ["default", "format"]}) == ({**schema, "required": ["default", "format"]}, [])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"format": "idn-email"}, "format"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"contains": TEXT}, "contains"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "integer", "minimum": 10**25}, "minimum"),
        ({"exclusiveMaximum": -1e30}, "exclusiveMaximum"),
        ({"pattern": "(?=a)b"}, "pattern"),
        ({"pattern": r"(a)\1"}, "pattern"),
        ({"minProperties": 1, "properties": {"a": {}}}, "minProperties"),
    ],
    ids=str,
)
def test_what_only_a_validator_can_check_is_left_to_it_or_refused(schema: Any, place: str) -> None:
    whole = {"type": "object", "properties": {"x/y": {"items": schema}}}
    at = f"#/properties/x/y/items/{place}"
    kept, unenforced = reduced(whole, checked_later=True)
    assert place not in kept["properties"]["x/y"]["items"]
    assert unenforced == [at]
    with pytest.raises(RequestError, match=rf"structured_outputs\.json cannot be enforced; got {at}"):
        source_of(StructuredOutputsParams(json=whole))


@pytest.mark.parametrize(
    "schema", [{"not": TEXT}, {"if": {}, "then": TEXT}, {"$ref": "#", "unevaluatedItems": False}], ids=str
)
@pytest.mark.parametrize("checked_later", [False, True])
def test_what_decides_between_schemas_is_refused_by_its_place(schema: Any, checked_later: bool) -> None:
    with pytest.raises(RequestError, match="got #/anyOf/1/"):
        reduced({"anyOf": [TEXT, schema]}, checked_later)


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (
            {"properties": {"a": TEXT}, "unevaluatedProperties": False},
            {"properties": {"a": TEXT}, "additionalProperties": False},
        ),
        ({"additionalProperties": TEXT, "unevaluatedProperties": False}, {"additionalProperties": TEXT}),
        ({"prefixItems": [TEXT], "unevaluatedItems": TEXT | {"title": "x"}}, {"prefixItems": [TEXT], "items": TEXT}),
        ({"maxItems": 2.0, "minLength": 1.0}, {"maxItems": 2, "minLength": 1}),
        ({"format": "email"}, {"format": "email", "maxLength": 320}),
    ],
    ids=str,
)
def test_a_keyword_becomes_a_plainer_one_that_says_the_same(schema: Any, plain: Any) -> None:
    assert reduced({"anyOf": [schema]}) == ({"anyOf": [plain]}, [])


def test_names_that_a_call_may_repeat_are_counted_when_it_is_run() -> None:
    schema = {"additionalProperties": TEXT, "required": ["a"], "minProperties": 3}
    assert reduced(schema) == (schema, [])
    assert reduced(schema, checked_later=True)[1] == ["#/minProperties"]


@pytest.mark.parametrize("keyword", ["dependentSchemas", "dependencies"])
def test_a_property_that_may_not_come_is_no_empty_constraint(keyword: str) -> None:
    assert reduced({keyword: {"a": True, "b": {}}}) == ({}, [])
    with pytest.raises(RequestError, match=f"got #/{keyword}"):
        reduced({keyword: {"a": False}})


def test_one_of_several_is_checked_later_unless_a_discriminator_tells_them_apart() -> None:
    options: Any = [{"type": "integer"}, {"type": "number"}]
    assert reduced({"oneOf": options}, checked_later=True)[1] == ["#/oneOf"]
    assert reduced({"oneOf": options, "discriminator": {}}, checked_later=True)[1] == []


def test_bounds_that_no_reader_of_json_keeps_become_ones_that_it_does() -> None:
    schema = {"type": "integer", "minimum": -(10**30), "exclusiveMaximum": 10**30}
    assert reduced(schema) == ({"type": "integer", "minimum": -(10**18), "maximum": 10**18}, [])
    assert reduced({"type": "integer", "maximum": 2**53 - 1}) == ({"type": "integer", "maximum": 2**53 - 1}, [])


def test_types_of_tools_may_have_other_languages_names() -> None:
    assert reduced({"type": ["float", "None"], "items": {"type": "dict"}}, checked_later=True)[0] == {
        "type": ["number", "null"],
        "items": {"type": "object"},
    }


def test_annotations_do_not_count_against_the_limit() -> None:
    long: Any = {"type": "object", "description": "x" * 40_000, "properties": {"a": TEXT | {"title": "y" * 40_000}}}
    assert source_of(StructuredOutputsParams(json=long)) == source_of(StructuredOutputsParams(json=reduced(long)[0]))
    assert len(source_of(StructuredOutputsParams(json=long))[1]) < 100
