"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, values written as text."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.parsers.call_grammars import CallGrammar, check_name
from jinfercept.parsers.hermes import CLOSING, OPENING, QWEN_TURN_ENDS
from jinfercept.parsers.lark import Rules, one_of, pattern, quoted
from jinfercept.parsers.python_literals import to_json
from jinfercept.parsers.schema_values import property_types, value_of
from jinfercept.parsers.source import Marks, Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.tool_schemas import constraints, inner, named_arguments, resolved

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]")
_WHOLE_NAME = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
_NEXT_VALUE = "\n" + _PARAMETER
_ENDS = (_PARAMETER_END, _FUNCTION_END, _NEXT_VALUE)
_VALUE_ENDS = Marks(_ENDS)


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    Tags are never content. A call begins with `<function=…>`, its `<tool_call>` may be missing; text beside parameters is
    dropped. A value ends at a `</parameter>` or `</function>` with markup behind it, or before a line that begins with the
    next parameter. Each value becomes one piece of JSON, of the type in the tool's schema (`schema_values`). Closing
    tags may be missing where the turn ends after a value; a call that ends within one, or before any, is cut off.
    """
    while mark := (yield from source.read_content()):
        if mark == _FUNCTION:
            yield from _read_call(source)


def _read_call(source: Source) -> Steps[None]:
    """Read `name>…</function>`, or leave it as content."""
    start = source.at
    name = (yield from source.match(_NAME)).strip()
    if not name or (yield from source.peek()) != ">":
        if not source.ended or source.at < len(source.text):
            source.at = start
        else:
            source.drop_rest()
        return
    source.at += 1
    source.begin_call(name, start)
    source.add_arguments("")
    schema = (source.tools or {}).get(name, {})
    marks = Marks(tuple(tag for tag in source.tags if tag != _PARAMETER_END))
    separator, rest = "{", source.at
    while (mark := (yield from source.skip_until(marks))) == _PARAMETER:
        source.at += len(_PARAMETER)
        key = (yield from source.match(_NAME)).strip()
        if (yield from source.peek()) != ">":
            continue
        source.at += 1
        text = yield from _read_value(source)
        if text is None:
            return
        source.add_arguments(f"{separator}{to_json(key)}: {_json(text, property_types(schema, key))}")
        separator, rest = ", ", source.at
    if not mark and (separator == "{" or source.text[rest:].strip()):
        return
    if mark == _FUNCTION_END:
        source.at += len(_FUNCTION_END)
    source.add_arguments("{}" if separator == "{" else "}")
    source.end_call()


def _read_value(source: Source) -> Steps[str | None]:
    """The next value; passes over its closing tag. None if it is cut off. One line break on each side is no part of it."""
    start = source.at
    while mark := (yield from source.skip_until(_VALUE_ENDS)):
        end, after = source.at, source.at + len(mark)
        source.at = after
        if mark == _NEXT_VALUE:
            ends = (yield from source.match(_NAME)) and (yield from source.peek()) == ">"
        else:
            ends = not (yield from source.skip()) or (yield from _markup_follows(source))
        source.at = after
        if ends:
            source.at = after if mark == _PARAMETER_END else end
            break
    else:
        return None
    return source.text[start:end].removeprefix("\n").removesuffix("\n")


def _json(text: str, types: Sequence[str]) -> str:
    """A value as JSON, of one of these types; as a string if JSON cannot express it."""
    try:
        return to_json(value_of(text, types))
    except (ValueError, RecursionError):
        return to_json(text)


def _markup_follows(source: Source) -> Steps[bool]:
    """Whether the next text is a tag that may stand behind a value, or the end of a turn."""
    return bool((yield from source.take(*(tag for tag in source.tags if tag != _PARAMETER_END))))


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        parts = [quoted(f"{_FUNCTION}{name}>\n")]
        for key, value, needed in named_arguments(name, schema):
            check_name(_WHOLE_NAME, key, "argument")
            rule = _value_rule(calls.rules, key, value, closing)
            parts.append(f"({quoted(f'{_PARAMETER}{key}>\n')} {rule} {rest})" + ("" if needed else "?"))
        return " ".join((*parts, calls.tag(_FUNCTION_END)))

    if calls.token_of(_PARAMETER_END) is None:
        closing, rest = f"\n{_PARAMETER_END}\n", ""
    else:
        closing, rest = "\n", rf'{calls.tag(_PARAMETER_END)} "\n"'
    call = rf'{calls.tag(OPENING)} "\n" {calls.each(write, _WHOLE_NAME)} "\n" {calls.tag(CLOSING)}'
    return calls.several(call, r'"\n"?') + r' "\n"?'


def _value_rule(rules: Rules, name: str, schema: Mapping[str, Any], closing: str) -> str:
    """The name of a rule for a value and the text behind it: a text as it is, anything else as JSON.

    The reader tells from the schema whether a value is a text (`schema_values`), so a value that may be a text or of another
    type cannot be written exactly.

    Args:
        rules: get the rule.
        name: of the argument.
        schema: of the value, with the definitions that it refers to.
        closing: the text behind the value; part of the rule, since a lexer could not tell it from the value.

    Raises:
        RequestError: plain text cannot express what the schema asks for.
    """
    schema = resolved(schema)
    types = {*property_types({"properties": {name: schema}, **schema}, name)}
    if "string" in types or not types:
        if types <= {"string", "null"}:
            return rules.terminal(f"{one_of(_text_options(name, schema))} {quoted(closing)}")
        raise _inexact(name, f"{sorted(types)}")
    return rules.rule(f"{rules.json(schema)} {quoted(closing)}")


def _text_options(name: str, schema: Mapping[str, Any]) -> list[str]:
    """Expressions for a text, or null."""
    keywords = constraints(schema)
    kind = schema.get("type")
    if keywords == {"anyOf"}:
        options = [resolved(inner(schema, option)) for option in schema["anyOf"]]
        return [text for option in options for text in _text_options(name, option)]
    if keywords - {"type"} in ({"const"}, {"enum"}):
        values = [schema["const"]] if "const" in keywords else schema["enum"]
        kinds = ["string", "null"] if kind is None else [kind] if isinstance(kind, str) else kind
        return [_quoted_choice(name, value) for value in values if ("null" if value is None else "string") in kinds]
    if isinstance(kind, list):
        return [text for one in kind for text in _text_options(name, {**schema, "type": one})]
    if kind == "null":
        return [quoted("null")]
    if keywords <= {"type", "pattern", "minLength", "maxLength", "format"}:
        return [_free_text(schema)]
    raise _inexact(name, ", ".join(sorted(keywords - {"type"})))


def _quoted_choice(name: str, value: Any) -> str:
    if isinstance(value, str) and not any(end in f"\n{value}\n" for end in _ENDS):
        return quoted(value)
    if value is None:
        return quoted("null")
    raise _inexact(name, repr(value))


def _free_text(schema: Mapping[str, Any]) -> str:
    """Any text without the ends of a value, of the schema's length and pattern."""
    ends = "|".join(end.replace("/", r"\/") for end in _ENDS)
    parts = [pattern("(?s:.*)"), "~" + pattern(f"(?s:.*)({ends})(?s:.*)")]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if (least, most) != (0, ""):
        parts.append(pattern(f"(?s:.{{{json.dumps(least)},{most}}})"))
    if expression := schema.get("pattern"):
        before = "" if str(expression).startswith("^") else "(?s:.*)"
        after = "" if str(expression).endswith("$") else "(?s:.*)"
        parts.append(pattern(f"{before}({str(expression).removeprefix('^').removesuffix('$')}){after}"))
    return f"({' & '.join(parts)})"


def _inexact(name: str, got: str) -> RequestError:
    return RequestError(
        f"the argument {name!r} cannot be written as plain text",
        got=got,
        fix='declare it of one type, or leave the call to the model (tool_choice="auto")',
    )


QWEN3_CODER = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: OPENING in template and _FUNCTION in template,
    tags=(OPENING, CLOSING, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END),
    turn_ends=QWEN_TURN_ENDS,
)
