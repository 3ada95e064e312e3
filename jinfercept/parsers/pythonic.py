"""Llama 3.2, ToolACE: a list of Python calls, `[f(a=1), g(b="x")]`, where the turn begins."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from jinfercept.parsers.call_grammars import CallGrammar, check_name
from jinfercept.parsers.call_objects import read_calls
from jinfercept.parsers.lark import Rules, one_of, pattern, quoted
from jinfercept.parsers.llama import LLAMA3_TURN_ENDS, PYTHON_TAG
from jinfercept.parsers.python_calls import PythonCall, read_call, write_calls
from jinfercept.parsers.source import Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.tool_schemas import Argument, constraints, inner, named_arguments

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_ARGUMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_ASKS = re.compile(r"\[func(_name)?1\(")
_LLAMA4_ROLE = "<|header_start|>"  # Llama 4 has other tags
_BARE_LISTS = ("[", "```")
"""Texts that a list of calls without a tag may begin with."""
_STRING = r""""(\\["'\\nrt]|[^"\\\x00-\x1F\x7F])*"|'(\\["'\\nrt]|[^'\\\x00-\x1F\x7F])*'"""
_PLAIN = {"string": _STRING, "boolean": "True|False", "null": "None"}


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    The list becomes calls when it is complete, each with its arguments as one piece of JSON. The whole list is content if
    something in it is no call, has a positional argument, or a value that JSON cannot express; so is a list that is cut off.
    Behind a tag it may stand anywhere, and is dropped if cut off; the calls may be JSON objects there. Where the tools are
    known, a list at the beginning of a line, or in a code block, that calls only these is one too.
    """
    whole = True  # no list was cut off
    yield from _read_list(source, tagged=False)
    while mark := (yield from source.read_content()):
        if mark == PYTHON_TAG:
            yield from _read_tagged(source)
        elif mark in _BARE_LISTS and whole:
            whole = yield from _read_bare_list(source, mark)
        elif mark in _BARE_LISTS:
            source.add_content(len(mark))


def _read_bare_list(source: Source, opening: str) -> Steps[bool]:
    """Read a list without a tag that begins here, or its opening as content; returns whether it is not cut off."""
    start = source.at
    if source.begins_line and source.tools:
        if opening != "[":
            source.at += len(opening)
            yield from source.take("python", "tool_code")
            yield from source.skip()
        if (yield from source.peek()) == "[" and (calls := (yield from _read_calls(source, source.tools))):
            write_calls(source, calls)
            if opening != "[" and (yield from source.skip()) == "`":
                yield from source.take(opening)
            return True
    cut_off = source.ended and source.at == len(source.text)
    source.at = start
    source.add_content(len(opening))
    return not cut_off


def _read_tagged(source: Source) -> Steps[None]:
    """Read calls behind a tag."""
    start = source.at
    if (char := (yield from source.skip())) == "[":
        source.at += 1
        char = yield from source.skip()
    source.at = start
    if char == "{":
        yield from read_calls(source, tagged=True)
    else:
        yield from _read_list(source, tagged=True)


def _read_list(source: Source, tagged: bool) -> Steps[None]:
    """Read `[f(a=1), …]` after white space, or leave all of it to be read again.

    Args:
        tagged: a list that is cut off or empty is dropped; otherwise it is read again.
    """
    start = source.at
    if (yield from source.skip()) == "[":
        calls = yield from _read_calls(source)
        if calls or (calls is not None and tagged):
            write_calls(source, calls)
            return
    if tagged:
        source.leave(start)
    else:
        source.at = start


def _read_calls(source: Source, names: Collection[str] | None = None) -> Steps[list[PythonCall] | None]:
    """Pass over the list that opens here; its calls, or None if anything else is in it.

    Args:
        names: the functions that can be called; None: any.
    """
    source.at += 1
    calls: list[PythonCall] = []
    while (yield from source.skip()) != "]":
        call = yield from read_call(source, names)
        if call is None:
            return None
        calls.append(call)
        char = yield from source.skip()
        if char == ",":
            source.at += 1
        elif char != "]":
            return None
    source.at += 1
    return calls


def _list_grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        options = one_of(
            calls.rules.listed(map(member, option), quoted(", ")) for option in named_arguments(name, schema)
        )
        return f"{quoted(f'{name}(')} {options} {quoted(')')}"

    def member(argument: Argument) -> tuple[str, bool]:
        check_name(_ARGUMENT_NAME, argument.name, "argument")
        return f"{quoted(f'{argument.name}=')} {_value_rule(calls.rules, argument.schema)}", argument.needed

    return f'"[" {calls.several(calls.each(write, _TOOL_NAME), quoted(", "))} "]"'


def _value_rule(rules: Rules, schema: Mapping[str, Any]) -> str:
    """The name of a rule for the Python literals that a schema allows; where there is none, for JSON, which is read too.

    Args:
        schema: of the value, with the definitions that it refers to.
    """
    keywords = constraints(schema)
    kind = schema.get("type")
    if keywords == {"$ref"}:
        return _reference_rule(rules, schema)
    if "const" in keywords or "enum" in keywords:
        values = [schema["const"]] if "const" in keywords else schema["enum"]
        plain = len(keywords) == 1 or (
            keywords <= {"const", "enum", "type"}
            and kind == "string"
            and all(isinstance(value, str) for value in values)
        )
        if plain and values:
            return rules.terminal(one_of(text for value in values for text in _literals(value)))
        return rules.json(schema)
    if keywords == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
        return rules.rule(one_of(_value_rule(rules, inner(schema, option)) for option in schema["anyOf"]))
    if isinstance(kind, list) and kind:
        return rules.rule(one_of(_value_rule(rules, {**schema, "type": type_name}) for type_name in kind))
    if keywords == {"type"} and kind in _PLAIN:
        return rules.terminal(pattern(_PLAIN[kind]))
    if kind == "array" and "items" in keywords and keywords <= {"type", "items", "minItems", "maxItems"}:
        return _list_rule(rules, schema)
    if kind == "object" and {"additionalProperties", "properties"} <= keywords <= {
        *("type", "properties", "required", "additionalProperties")
    }:
        return _dict_rule(rules, schema)
    return rules.json(schema)


def _reference_rule(rules: Rules, schema: Mapping[str, Any]) -> str:
    """The rule of a referenced definition; written once for each."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    key = json.dumps([schema["$ref"], definitions])
    if key not in rules.references:
        _, place, *steps = [*str(schema["$ref"]).split("/"), ""]
        definition = definitions.get(place, {}).get(steps[0]) if len(steps) == 2 else None
        if not isinstance(definition, Mapping):
            return rules.json(schema)
        rules.references[key] = name = rules.name()
        rules.define(name, _value_rule(rules, {**definitions, **definition}))
    return rules.references[key]


def _list_rule(rules: Rules, schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if not isinstance(least, int) or not isinstance(most, int | None) or (most is not None and most < max(1, least)):
        return rules.json(schema)
    item = _value_rule(rules, inner(schema, schema["items"]))
    more = f'(", " {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}' if most != 1 else ""
    return rules.rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')


def _dict_rule(rules: Rules, schema: Mapping[str, Any]) -> str:
    properties, needed = schema["properties"], schema.get("required", [])
    if schema["additionalProperties"] is not False or not isinstance(needed, list) or {*needed} - {*properties}:
        return rules.json(schema)
    members = [
        (f'{one_of(_literals(key))} ": " {_value_rule(rules, inner(schema, value))}', key in needed)
        for key, value in properties.items()
    ]
    return rules.rule(f'"{{" {rules.listed(members, quoted(", "))} "}}"')


def _literals(value: Any) -> list[str]:
    """Expressions for a value as Python writes it; for a string, with either quotes."""
    texts = [repr(value)]
    if isinstance(value, str):
        texts.append(json.dumps(value, ensure_ascii=False))
    return [quoted(text) for text in texts]


PYTHONIC = ToolCallFormat(
    read=_read,
    grammar=lambda calls: calls.tagged(PYTHON_TAG, _list_grammar(calls)),
    detect=lambda template: bool(_ASKS.search(template)) and _LLAMA4_ROLE not in template,
    tags=(PYTHON_TAG,),
    turn_ends=LLAMA3_TURN_ENDS,
    openings=_BARE_LISTS,
)
