"""Turns that have to call, drawn at random of what their grammars allow: every one is calls that their tools take."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.chat.turn_grammars import compile_calls, tool_choice
from jinfercept.errors import RequestError
from tests.support.call_corpus import calls, turn, vocabulary
from tests.support.sample_tokenizers import closed_objects

NEW_MISTRAL = "[TOOL_CALLS] [CALL_ID] [ARGS]"
ONE_CALL = {"openai"}
"""Formats in which a call ends its turn."""
WRITINGS = [*((name, "") for name in FORMATS), ("mistral", NEW_MISTRAL)]

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where </parameter>"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 3},
            "unit": {"enum": ["°C", '°"F"', "it's K"]},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[a-c]{2}-[0-9]$"},
            "size": {"type": ["number", "null"]},
        },
        "required": ["city", "exact"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"at": {"type": "number"}, "in": {"$ref": "#/$defs/place"}, "is": {"type": "boolean"}},
                "required": ["at"],
                "additionalProperties": False,
            }
        },
    },
    "now": {},
}


@pytest.mark.parametrize("marked", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize(("name", "template"), WRITINGS)
def test_a_turn_that_has_to_call_calls_with_arguments_that_fit(name: str, template: str, marked: bool) -> None:
    turns = [
        calls(name, TOOLS, turn(name, template, TOOLS, seed, marked=marked))
        for seed in range(16 if name in ONE_CALL else 8)
    ]
    assert {tool for turn in turns for tool, _ in turn} == {*TOOLS}
    assert max(map(len, turns)) > 1 or name in ONE_CALL
    assert all(not arguments for turn in turns for tool, arguments in turn if tool == "now")
    assert any({*arguments} - {"city", "exact"} for turn in turns for _, arguments in turn)


COMBINED: dict[str, Any] = {
    "$ref": "#/$defs/whole",
    "$defs": {
        "whole": {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "n": {"type": "integer", "minimum": 0}}, "required": ["n"]},
                {"$ref": "#/$defs/b"},
            ],
            "required": ["kind"],
        },
        "b": {"allOf": [{"properties": {"kind": {"enum": ["b", "c"]}}}, {"$ref": "#/$defs/on"}]},
        "on": {"anyOf": [{"properties": {"on": {"type": "boolean"}}, "required": ["on"]}]},
    },
}


@pytest.mark.parametrize(("name", "template"), WRITINGS)
def test_a_tool_whose_schema_combines_others_can_be_required(name: str, template: str) -> None:
    tools = {"f": COMBINED}
    drawn = [calls(name, tools, turn(name, template, tools, seed, parallel=False)) for seed in range(9)]
    assert {arguments["kind"] == "a" for ((_, arguments),) in drawn} == {True, False}


@pytest.mark.parametrize("tool", ["read-file", "mcp.fs__a-b", "1st", "class"])
def test_a_tool_whose_name_is_none_in_python_can_be_required(tool: str) -> None:
    tools = {tool: {"properties": {"item": {"type": "string"}}, "required": ["item"]}}
    assert calls("pythonic", tools, turn("pythonic", "", tools, 1, parallel=False))[0][0] == tool


@pytest.mark.parametrize(("name", "template"), WRITINGS)
def test_without_parallel_calls_there_is_exactly_one(name: str, template: str) -> None:
    for seed in range(6):
        assert len(calls(name, TOOLS, turn(name, template, TOOLS, seed, parallel=False))) == 1


@pytest.mark.parametrize(
    ("name", "template", "text"),
    [
        ("hermes", "", '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>\n<tool_call>'),
        (
            "qwen3_coder",
            "",
            '<tool_call>\n<function=f>\n{"a": "b <c>"}\n</function>\n</tool_call>',
        ),
        ("llama3_json", "", '{"name": "f", "parameters": {"a": "b"}}; {"name": "f", "parameters": {"a": "c"}}'),
        ("llama3_json", "", '<|python_tag|>{"name": "f", "parameters": {"a": "b"}}'),
        ("mistral", "", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}}, {"name": "f", "arguments": {"a":"c"}}]'),
        ("mistral", "", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]'),
        ("mistral", NEW_MISTRAL, '[TOOL_CALLS]f[CALL_ID]aBc12dEf3[ARGS]{"a": "b"}[TOOL_CALLS]f[ARGS]{"a": "b"}'),
        ("pythonic", "", '{"name": "f", "parameters": {"a": "b"}}'),
    ],
)
def test_what_the_families_write_is_allowed(name: str, template: str, text: str) -> None:
    tokenizer, grammars = vocabulary(True)
    tools = {"f": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}
    choice = tool_choice("required", True, chat_tools([{"name": "f", "parameters": tools["f"]}]))
    grammar = compile_calls(choice, replace(FORMATS[name], tools=tools), template, tokenizer, grammars)
    assert grammar is not None
    for space in ("", "\n\n"):
        constraint = grammar.constrain(tokenizer.eos_token_ids)
        for token in tokenizer.encode(space + text):
            constraint.accept(token)


_LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer"},
        {"type": "integer", "minimum": -5, "maximum": 1000},
        {"type": "number"},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"type": "string"},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^a[b/c]{0,3}$"},
        {"type": "string", "enum": ["null", "a\n", "'", '"</b>"', "\\"]},
        {"enum": [1, None, 2.5, [True]]},
        {"const": {"x": ["é", None]}},
        {"type": "string", "enum": ["a", "b", None]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": ["string", "null"], "enum": ["a", "b"]},
        {"type": ["string", "null"], "maxLength": 2},
        {"type": ["integer", "null"]},
        {"type": "object"},
    ]
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
            *(inner, st.integers(0, 2), st.integers(0, 2)),
        ),
        st.builds(lambda *some: {"anyOf": list(some)}, inner, inner),
        closed_objects(inner),
    ),
    max_leaves=5,
)
_PARAMETERS = st.builds(
    lambda some, required: {"type": "object", "properties": some, "required": sorted(some)[:required]},
    st.dictionaries(st.sampled_from(["a", "b_1", "from", "x"]), _SCHEMAS, max_size=4),
    st.integers(0, 4),
)


@settings(max_examples=25)
@given(st.sampled_from(WRITINGS), _PARAMETERS, st.integers(0, 1000), st.booleans())
@example(("hermes", ""), {"type": "object"}, 0, False)
def test_whatever_the_schema_the_arguments_fit(
    writing: tuple[str, str], schema: dict[str, Any], seed: int, marked: bool
) -> None:
    name, template = writing
    tools = {"f": schema}
    calls(name, tools, turn(name, template, tools, seed, marked=marked))


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("hermes", {"a<b": {}}, "cannot write the name of this tool"),
        ("qwen3_coder", {"a<b": {}}, "cannot write the name of this tool"),
        ("llama3_json", {"f": {"type": "array"}}, "no object"),
        ("hermes", {"f": {"properties": {"a": {"type": "what"}}}}, "Invalid type"),
        ("hermes", {"f": {"properties": 3}}, "f"),
        ("hermes", {"now": {}, "f": {"properties": {"a": {"not": {}}}}}, "tool 'f'"),
        ("qwen3_coder", {"f": {"properties": {"a": {}}, "required": ["b"]}}, "tool 'f'"),
        ("qwen3_coder", {"f": {"$ref": "#/$defs/f", "$defs": {"f": {"$ref": "#/$defs/f"}}}}, "tool 'f'"),
        ("pythonic", {"f": {"properties": {"a": {"$ref": "#/$defs/none"}}}}, "tool 'f'"),
        ("hermes", {"f": {"properties": {"a": {"const": {1, 2}}}}}, "TypeError"),
    ],
)
def test_what_a_format_cannot_hold_to_is_refused(name: str, tools: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        turn(name, "", tools, 0)
    assert len(str(caught.value)) < 600
