"""Outputs of the families give the same pieces however they are divided, and markup is never shown."""

import json
import re
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from jinfercept.chat.parsers.formats import FORMATS, detect_format
from jinfercept.events import Arguments, CallEnded, CallStarted, Content
from tests.support.call_corpus import WRITTEN, Turn, corpus, decoded, parsed, xml_call

BY_FORMAT = {name: list(turns) for name, turns in groupby(corpus(), lambda turn: turn.format)}
TURNS = pytest.mark.parametrize("turns", BY_FORMAT.values(), ids=BY_FORMAT)
EVERY_FORMAT = pytest.mark.parametrize("name", sorted(FORMATS))


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
@TURNS
def test_a_turn_of_the_corpus_gives_its_pieces_divided_at_any_byte(turns: list[Turn], step: int) -> None:
    for turn in turns:
        data = turn.text.encode()
        assert parsed(turn.format, decoded(bytes([byte]) for byte in data), turn.tools) == turn.pieces, turn.name
        for at in range(1 + len(data) % step, len(data), step):
            assert parsed(turn.format, decoded([data[:at], data[at:]]), turn.tools) == turn.pieces, (turn.name, at)


@TURNS
def test_what_a_call_spans_is_the_text_that_it_was_written_in(turns: list[Turn]) -> None:
    for turn in turns:
        parser = replace(FORMATS[turn.format], tools=turn.tools).parser()
        pieces = [*parser.feed(turn.text), *parser.finish()]
        for call in (piece.call for piece in pieces if isinstance(piece, CallEnded)):
            written = turn.text[slice(*call.span)]
            assert written.startswith(("{", call.name)), turn.name
            assert written.rstrip().endswith(("}", ")", ">", call.arguments, call.name)), turn.name


@EVERY_FORMAT
def test_text_without_calls_is_shown_as_it_comes(name: str) -> None:
    parser = FORMATS[name].parser()
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(", you ") == [Content(", you")]
    assert parser.feed("\n") == []
    assert parser.feed("two") == [Content(" \ntwo")]
    assert parser.feed(" ") == []
    assert parser.finish() == [Content(" ")]


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
@TURNS
def test_a_turn_that_is_cut_off_anywhere_shows_nothing_that_the_whole_turn_does_not(
    turns: list[Turn], step: int
) -> None:
    for turn in turns:
        whole = "".join(piece[1] for piece in turn.pieces if piece[0] == "content")
        for length in range(len(turn.text) % step, len(turn.text), step):
            parser = replace(FORMATS[turn.format], tools=turn.tools).parser()
            pieces = [*parser.feed(turn.text[:length]), *parser.finish(cut=True)]
            shown = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            assert whole.startswith(shown.rstrip()), (turn.name, turn.text[:length], shown)


def test_arguments_stream_as_they_are_written() -> None:
    parser = FORMATS["hermes"].parser(lambda: "id")
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a"') == [CallStarted(0, "f", "id"), Arguments(0, '{"a"')]
    assert parser.feed(': "b\\') == [Arguments(0, ': "b\\')]
    assert parser.feed('"') == [Arguments(0, '"')]
    assert parser.feed('c"}') == [Arguments(0, 'c"}')]
    (ended,) = parser.feed("}")
    assert isinstance(ended, CallEnded)
    assert ended.call.arguments == '{"a": "b\\"c"}'


def test_what_might_be_a_call_without_tags_is_shown_at_the_first_doubt() -> None:
    def shown(text: str) -> str:
        parser = replace(FORMATS["hermes"], tools={"get_weather": {}}).parser()
        return "".join(piece.text for char in text for piece in parser.feed(char) if isinstance(piece, Content))

    assert shown('{"n') == shown('```json\n{"name": "get_w') == ""
    for text in (
        '{"no',
        '{"name": "p',
        '{"name": "get_weather", "d',
        "{x",
        "```p",
        '```json\n{"name": 1',
        "a {",
        "<tools>\na",
    ):
        assert shown(text) == text


def test_ids_have_the_form_that_the_templates_take() -> None:
    def ids(name: str, text: str) -> list[str]:
        parser = FORMATS[name].parser()
        return [piece.id for piece in [*parser.feed(text), *parser.finish()] if isinstance(piece, CallStarted)]

    first, second = ids("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]')
    assert first != second
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", made) for made in (first, second))
    (made,) = ids("hermes", '<tool_call>{"name": "f"}</tool_call>')
    assert re.fullmatch("call_[0-9a-f]{24}", made)


def test_an_id_that_an_earlier_call_has_is_replaced() -> None:
    def ids(text: str, used: set[str]) -> list[str]:
        made = (f"made {number}" for number in range(9))
        parser = FORMATS["hermes"].parser(lambda: next(made), used=used)
        pieces = [*parser.feed(text), *parser.finish()]
        calls = [piece.call.id for piece in pieces if isinstance(piece, CallEnded)]
        assert calls == [piece.id for piece in pieces if isinstance(piece, CallStarted)]
        return calls

    call = '<tool_call>{"id": "c1", "name": "f", "arguments": {}}</tool_call>'
    used = set[str]()
    assert ids(f"{call}\n{call}\n{call.replace('c1', 'c2')}", used) == ["c1", "made 0", "c2"]
    assert ids(call, used - {"made 0"}) == ["made 0"]


PARTS: dict[str, Any] = {
    "s": {"type": "string"},
    "payload": {"type": "object", "properties": {"deep": {"type": "array"}}},
    "n": {"type": "integer"},
    "maybe": {"type": ["number", "null"]},
    "on": {"enum": [True, False]},
}
PART_VALUES = {"s": '{"v": 1}', "payload": {"deep": [1, "2"]}, "n": 7, "maybe": None, "on": True}
HALVES = ({"properties": {"s": PARTS["s"], "n": PARTS["n"]}}, {"properties": {**PARTS, "n": {"type": "number"}}})
COMBINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "oneOf": ({"type": "object", "oneOf": [{"properties": PARTS}]}, PART_VALUES),
    "anyOf of two": ({"anyOf": [*HALVES]}, PART_VALUES),
    "allOf": ({"type": "object", "properties": {"s": {}}, "allOf": [*HALVES]}, PART_VALUES),
    "$ref": ({"$ref": "#/$defs/P", "$defs": {"P": {"properties": PARTS}}}, PART_VALUES),
    "$ref to $ref within allOf within oneOf": (
        {
            "oneOf": [{"allOf": [{"$ref": "#/definitions/Q"}, {"required": ["n"]}]}],
            "definitions": {"Q": {"$ref": "#/definitions/P~1P/0"}, "P/P": [{"properties": PARTS}]},
        },
        PART_VALUES,
    ),
    "$ref to itself": ({"allOf": [{"$ref": "#"}, {"properties": PARTS}]}, PART_VALUES),
    "if, then and else": (
        {"if": {"properties": {"s": PARTS["s"]}}, "then": {"properties": PARTS}, "else": {"properties": {}}},
        PART_VALUES,
    ),
    "dependentSchemas": (
        {"properties": {"s": PARTS["s"]}, "dependentSchemas": {"s": {"properties": PARTS}}},
        PART_VALUES,
    ),
    "additionalProperties": ({"additionalProperties": {"type": "object"}}, {"a": {"v": 1}, "b": {}}),
    "unevaluatedProperties": ({"unevaluatedProperties": {"type": "integer"}, "oneOf": [{}]}, {"a": 7}),
    "patternProperties": (
        {
            "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}},
            "additionalProperties": {"type": "boolean"},
        },
        {"n_a": 7, "s_a": "7", "other": True},
    ),
    "oneOf of a property": (
        {
            "properties": {
                "a": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"$ref": "#/$defs/O"}]},
                "b": {"$ref": "#/properties/a"},
            },
            "$defs": {"O": {"type": "object", "nullable": True}},
        },
        {"a": {"v": 1}, "b": "007"},
    ),
    "a type that a branch narrows": (
        {"properties": {"a": {"type": ["integer", "string"]}}, "anyOf": [{"properties": {"a": {"type": "string"}}}]},
        {"a": "7"},
    ),
    "branches that disagree": (
        {"oneOf": [{"properties": {"v": {"type": "string"}}}, {"properties": {"v": {"type": "integer"}}}]},
        {"v": 7},
    ),
}


@pytest.mark.parametrize(("schema", "values"), COMBINED.values(), ids=COMBINED)
def test_arguments_have_the_types_that_a_combined_schema_says_whole_and_streamed(
    schema: Any, values: dict[str, Any]
) -> None:
    text = xml_call("f", values)
    for parts in ([text], text):
        ((_, called, arguments, *_),) = parsed("qwen3_coder", parts, {"f": schema})
        assert (called, json.loads(arguments)) == ("f", values)


@EVERY_FORMAT
def test_huge_arguments_are_read_in_time_that_grows_with_their_length(name: str) -> None:
    """Thirty thousand characters in small tokens, with brackets and escapes in a string."""
    value = 'ab{"\\[' * 5_000
    tools = {"f": {"properties": {"a": {"type": "string"}}}}
    if name == "pythonic":
        text = f"[f(a={value!r})]"
    elif name in WRITTEN:
        text = WRITTEN[name]([("f", {"a": value})])
    else:
        opening = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(name, "")
        text = f'{opening}{{"name": "f", "arguments": {json.dumps({"a": value})}}}'
    ((_, called, arguments, *_),) = parsed(name, (text[at : at + 5] for at in range(0, len(text), 5)), tools)
    assert (called, json.loads(arguments)) == ("f", {"a": value})


@EVERY_FORMAT
def test_deep_nesting_raises_nothing(name: str) -> None:
    for deep in ("[" * 5_000, "{" * 5_000, '{"a":' * 3_000, "[f(a=" * 3_000, "(" * 5_000 + ")" * 5_000):
        for opening in ("", *FORMATS[name].tags):
            parsed(name, [opening, deep])
            parsed(name, [opening, '{"name": "f", "arguments": ', deep])
            parsed(name, [opening, "[f(a=", deep, deep.translate({91: 93, 123: 125, 40: 41}), ")]"])


GONE = [
    "{%- set token = '｜DSML｜' -%}{{ '<' + token + 'function_calls>' }}",
    '<function name="function-name"><param name="param-name">param-value</param></function>',
    "{{ '<|tool_call_argument_begin|>' }}",
    "{{ tools }}{{ '<｜tool▁sep｜>' + name + '\\n```json\\n' }}",
    "Start with <|START_ACTION|>[",
    "'<|tool_call_start|>[' + calls + ']<|tool_call_end|>'",
    '<|start_header_id|><function=example_function_name>{"example_name": "example_value"}</function>',
    '<|header_start|>{{ \'Respond in the format {"name": function name, "parameters": d\' }}',
    "<|header_start|>system Use exact format: [func_name1(param1=value1), func_name2(...)]",
    "{%- set begin = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">",
    "{%- set begin = token ~ '<tool_call>' %}{{ token + '<invoke name=\"tool-name-1\">' }}",
    "<seed:tool_call>\\n<function=example_function_name>",
    'XML tags\n<tool_calls>\n{"name": <tool-name>',
]
"""Templates whose formats are not known: no other format is taken for theirs."""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}', "hermes"),
        ('return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\":', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        (
            '<|start_header_id|>system{{ \'Respond in the format {"name": function name, "parameters": d\' }}',
            "llama3_json",
        ),
        ("<|start_header_id|>{{ '{\"name\": \"' + tool_call.name + '\", ' }}{{ '\"parameters\": ' }}", "llama3_json"),
        (
            "<|start_header_id|> Respond in the format [func_name1(params_name1=params_value1), func_name2(p)]",
            "pythonic",
        ),
        *((text, None) for text in GONE),
        ("<|start_of_role|>system<|end_of_role|>respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("use the following format: <TOOLCALL>[", "nemotron_json"),
        ("function calls within <tool_call></tool_call> XML tags: <tool_calls>[", "apriel"),
        ("formatted as functools[", "firefunction"),
        ("{{ '<|tool_call>call:' + name + '{' }}{{ '}<tool_call|>' }}", "gemma4"),
        ('{{- "[TOOL_CALLS] [" }}{%- for tool_call in tool_calls %}', "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
        ("{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'}}", None),
        ("<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ message['content'] }}<|eot_id|>", None),
        ("", None),
    ],
)
def test_the_template_gives_the_format_away(template: str, name: str | None) -> None:
    assert detect_format(template) == name
