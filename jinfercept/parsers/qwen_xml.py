"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, values written as text."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
_ENDS = (_PARAMETER_END, _FUNCTION_END, "\n" + _PARAMETER)
_TAGS_IN_VALUES = Marks((_PARAMETER, _PARAMETER_END, _FUNCTION, _FUNCTION_END))
_OPEN_SCHEMAS = {"$ref", "allOf", "anyOf", "else", "if", "oneOf", "patternProperties", "then"}


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    Tags are never content. A call begins with `<function=…>`, its `<tool_call>` may be missing; text beside parameters is
    dropped. `_read_value` says where a value ends. Each value becomes one piece of JSON, of the type in the tool's schema
    (`schema_values`). Closing tags may be missing where the turn ends after a value; a call that ends within one, or before
    any, is cut off.
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
    given: set[str] = set()
    rest = source.at

    def is_next(key: str) -> bool:
        return key not in given and (not given or _is_declared(schema, key))

    while (mark := (yield from source.skip_until(marks))) == _PARAMETER:
        source.at += len(_PARAMETER)
        key = yield from _rest_of_tag(source)
        if key is None or not is_next(key):
            continue
        separator = ", " if given else "{"
        given.add(key)
        text = yield from _read_value(source, is_next)
        if text is None:
            return
        source.add_arguments(f"{separator}{to_json(key)}: {_json(text, property_types(schema, key))}")
        rest = source.at
    if not mark and (not given or source.text[rest:].strip()):
        return
    if mark == _FUNCTION_END:
        source.at += len(_FUNCTION_END)
    source.add_arguments("}" if given else "{}")
    source.end_call()


def _is_declared(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an argument may have this name: a schema without properties, or one that says more of them, allows any."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or _OPEN_SCHEMAS & {*schema} or schema.get("additionalProperties"):
        return True
    return key in properties


def _rest_of_tag(source: Source) -> Steps[str | None]:
    """The name in a tag whose beginning was read; passes over its `>`. None if this is no tag."""
    name = (yield from source.match(_NAME)).strip()
    if (yield from source.peek()) != ">":
        return None
    source.at += 1
    return name


def _read_value(source: Source, is_next: Callable[[str], bool]) -> Steps[str | None]:
    """The next value; passes over its closing tag. One line break on each side is no part of it.

    Values are not escaped, so a value may quote the markup that it stands in. It ends at a `</parameter>` that closes no
    parameter opened within the value, before a tag that may follow it. Where there is none up to the end of the function,
    closing tags are missing: it ends where the first tag that may follow it stands, a parameter at the beginning of a line.

    Args:
        is_next: whether an argument of this name may follow: one that the tool has, and that was not given.

    Returns:
        None if the value is cut off.
    """
    start = source.at
    num_parameters = num_functions = 0  # opened within the value
    first_end: tuple[int, int] | None = None  # of the value, and of the tag that closes it
    while mark := (yield from source.skip_until(_TAGS_IN_VALUES)):
        end, after = source.at, source.at + len(mark)
        source.at = after
        if mark in (_PARAMETER, _FUNCTION):
            key = yield from _rest_of_tag(source)
            source.at = after
            if key is None:
                continue
            if mark == _PARAMETER and source.text[end - 1] == "\n" and is_next(key):
                first_end = first_end or (end, end)
            num_parameters += mark == _PARAMETER
            num_functions += mark == _FUNCTION
            continue
        may_end = yield from _may_follow(source, is_next)
        source.at = after
        if may_end:
            first_end = first_end or (end, after if mark == _PARAMETER_END else end)
        if mark == _PARAMETER_END:
            if may_end and not num_parameters:
                first_end = (end, after)
                break
            num_parameters = max(0, num_parameters - 1)
        elif may_end and not num_functions:
            break
        else:
            num_functions = max(0, num_functions - 1)
    if first_end is None or (source.cut and not mark):
        source.at = len(source.text)
        return None
    end, source.at = first_end
    return source.text[start:end].removeprefix("\n").removesuffix("\n")


def _json(text: str, types: Sequence[str]) -> str:
    """A value as JSON, of one of these types; as a string if JSON cannot express it."""
    try:
        return to_json(value_of(text, types))
    except (ValueError, RecursionError):
        return to_json(text)


def _may_follow(source: Source, is_next: Callable[[str], bool]) -> Steps[bool]:
    """Whether the next text is a tag that may stand behind a value, or the end of a turn."""
    if not (yield from source.skip()):
        return True
    mark = yield from source.take(*(tag for tag in source.tags if tag != _PARAMETER_END))
    if mark != _PARAMETER:
        return bool(mark)
    key = yield from _rest_of_tag(source)
    return not (yield from source.peek()) or (key is not None and is_next(key))


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
