"""Plain text becomes a value of the type in a tool's schema."""

import math
from typing import Any

import pytest

from jinfercept.chat.parsers.schema_values import property_types, value_of

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("property", "text", "value"),
    [
        ({}, "3", "3"),
        (STRING, " 3 ", " 3 "),
        (STRING, "null", "null"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, STRING]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, STRING]}, "three", "three"),
        ({"type": "integer"}, " -3\n", -3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "number"}, "1e300", 1e300),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "[1, 'a', True, None]", [1, "a", True, None]),
        ({"type": "array"}, "1, 2", [1, 2]),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({"type": "object"}, "\"{'a': 1}\"", {"a": 1}),
        ({"type": "array"}, r"[{\"a\": \"C:\\\\b\"}]", [{"a": "C:\\b"}]),
        ({"type": "array"}, 'x", [1], "y', 'x", [1], "y'),
        ({"type": "array"}, "[1e999]", [math.inf]),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"type": "object"}, "open('x')", "open('x')"),
        ({"type": "float"}, "1.5", 1.5),
        ({"type": "List[int]"}, "[1]", [1]),
        ({"type": ["int", "None"]}, "null", None),
        ({"anyOf": [{"type": "list"}, {"type": "float"}]}, "2.5", 2.5),
        ({"type": "string", "nullable": True}, "null", None),
        ({"oneOf": [STRING, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"oneOf": [STRING, {"type": "object"}]}, "{'a': 1}", "{'a': 1}"),
        ({"type": ["string", "number"]}, "007", "007"),
        ({"type": ["string", "integer"], "allOf": [STRING]}, "3", "3"),
        ({"type": "number", "allOf": [{"type": "integer"}]}, "3.5", "3.5"),
        ({"allOf": [{"$ref": "#/$defs/Text"}], "nullable": True}, "null", None),
        ({"if": {"type": "array"}, "then": {}, "else": {"type": "integer"}}, "[1]", [1]),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/Sizes"}, "[1]", [1]),
        ({"$ref": "#/$defs/Loop"}, "[1]", "[1]"),
        ({"$ref": "elsewhere"}, "1", "1"),
        ({"type": 3, "anyOf": 4}, "1", "1"),
    ],
)
def test_a_value_is_of_the_first_type_that_it_can_be(property: Any, text: str, value: Any) -> None:
    schema = {
        "properties": {"x": property},
        "$defs": {"Sizes": {"type": "array"}, "Loop": {"$ref": "#/$defs/Loop"}, "Text": STRING},
    }
    read = value_of(text, property_types(schema, "x"))
    assert read == value
    assert type(read) is type(value)


def test_an_undeclared_property_is_text() -> None:
    assert value_of("3", property_types({}, "x")) == "3"
    assert value_of("3", property_types({"properties": []}, "x")) == "3"


@pytest.mark.parametrize("pattern", ["(a+)+$", "a?" * 40 + "b", "a*a*a*a*a*a*b", "((", "a{1,99999999999}", r"\p{L}"])
def test_a_pattern_of_names_that_is_slow_or_unknown_to_python_matches_every_name(pattern: str) -> None:
    schema = {"patternProperties": {pattern: {"type": "integer"}}}
    assert property_types(schema, "a" * 60 + "c") == ["integer"]


def test_a_schema_that_doubles_or_is_deep_is_read_at_once() -> None:
    doubled: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(100)}
    doubled |= {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(5000)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**doubled, "a100": {"properties": {"x": {"type": "integer"}}}}}
    assert property_types(schema, "x") == ["integer"]
    assert property_types({**schema, "$ref": "#/$defs/c0"}, "x") == []
