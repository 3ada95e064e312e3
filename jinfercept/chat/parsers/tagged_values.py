"""Formats with arguments between tags, whose values have no escapes: Qwen3-Coder's and GLM 4.5's.

Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, with values on lines of their
own. GLM 4.5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`, with or without lines between.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jinfercept.chat.parsers.hermes import CLOSING, OPENING, QWEN_TURN_ENDS
from jinfercept.chat.parsers.json_calls import stream_arguments
from jinfercept.chat.parsers.python_calls import to_json
from jinfercept.chat.parsers.schema_values import may_have, property_types, value_of
from jinfercept.chat.parsers.source import Marks, Source, Steps
from jinfercept.chat.parsers.tool_call_format import CallGrammar, ToolCallFormat, quoted

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_TAGS = (OPENING, CLOSING, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END)
_BESIDE = (OPENING, CLOSING, _FUNCTION, _FUNCTION_END, _PARAMETER, *QWEN_TURN_ENDS)
"""What may stand beside an argument."""
_BESIDE_MARKS = Marks(_BESIDE)
_VALUE_MARKS = Marks((_PARAMETER, _PARAMETER_END, _FUNCTION, _FUNCTION_END))
_NAME_CHAR = re.compile(r'[^<>\n"]')
_NAME = re.compile(r'[^<>\s"]([^<>\n"]*[^<>\s"])?')
_LINE = r'"\n"?'


def _read(source: Source) -> Steps[None]:
    """Read a turn.

    Tags are never content. A call begins with its function's tag, even without the outer tag; it needs a parameter or its
    closing tag after the name. Text beside parameters is dropped. Each value becomes one piece of JSON, of the type in the
    tool's schema (`schema_values`). One JSON object may stand in place of all parameters. If the turn ends after a value,
    closing tags may be missing; a call that ends within a value, or before any, is cut off.
    """
    while mark := (yield from source.read_content()):
        if mark == _FUNCTION:
            yield from _read_call(source)


def _read_call(source: Source) -> Steps[None]:
    start = source.at
    name = yield from _read_name(source)
    behind = source.at
    if not name:
        source.leave(start)
        return
    if (char := (yield from source.skip())) != "{":
        mark = yield from source.skip_until(_BESIDE_MARKS)
        if mark not in (_PARAMETER, _FUNCTION_END) and char and source.text[behind : source.at].strip():
            source.at = start
            return
    source.begin_call(name, start)
    source.add_arguments("")
    if char == "{":
        if (yield from stream_arguments(source)):
            yield from source.skip()
            yield from source.take(_FUNCTION_END)
            source.end_call()
    else:
        yield from _read_parameters(source, name)


def _read_parameters(source: Source, name: str) -> Steps[None]:
    schema = (source.tools or {}).get(name, {})
    keys: set[str] = set()
    rest = source.at

    def is_next(key: str) -> bool:
        return key not in keys and (not keys or may_have(schema, key))

    while (mark := (yield from source.skip_until(_BESIDE_MARKS))) == _PARAMETER:
        source.at += len(mark)
        key = yield from _read_name(source)
        if not key or not is_next(key):
            continue
        separator = ", " if keys else "{"
        keys.add(key)
        text = yield from _read_value(source, is_next)
        if text is None:
            return
        source.add_arguments(f"{separator}{to_json(key)}: {_written_json(text, property_types(schema, key))}")
        rest = source.at
    if not mark and (not keys or source.text[rest:].strip()):
        return
    if mark == _FUNCTION_END:
        source.at += len(mark)
    source.add_arguments("}" if keys else "{}")
    source.end_call()


def _read_name(source: Source) -> Steps[str]:
    name = (yield from source.match(_NAME_CHAR)).strip()
    return name if (yield from source.take(">")) else ""


def _read_value(source: Source, is_next: Callable[[str], bool]) -> Steps[str | None]:
    """Read the next value and pass over its closing tag; None if the value is cut off.

    Values are not escaped, so a value may quote the markup around it. A value ends at a closing tag that closes no parameter
    opened within it, if a tag that may follow comes next. If there is none up to the end of the function, closing tags are
    missing: the value ends at the first tag that may follow it, for a parameter only at the beginning of a line.

    Args:
        is_next: whether an argument of this name may follow, because the tool has it and it was not given yet.
    """
    start = source.at
    num_parameters = num_functions = 0  # opened within the value
    first_end: tuple[int, int] | None = None  # of the value, and of the tag that closes it
    while mark := (yield from source.skip_until(_VALUE_MARKS)):
        end, after = source.at, source.at + len(mark)
        source.at = after
        if mark in (_PARAMETER, _FUNCTION):
            name = yield from _read_name(source)
            source.at = after
            if not name:
                continue
            if mark == _PARAMETER and source.text[end - 1] == "\n" and is_next(name):
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


def _written_json(text: str, types: list[str]) -> str:
    """Write a value as JSON of one of these types, or as a string if JSON cannot express it."""
    try:
        return to_json(value_of(text, types))
    except (ValueError, RecursionError):
        return to_json(text)


def _may_follow(source: Source, is_next: Callable[[str], bool]) -> Steps[bool]:
    if not (yield from source.skip()):
        return True
    mark = yield from source.take(*_BESIDE)
    if mark != _PARAMETER:
        return bool(mark)
    key = yield from _read_name(source)
    return not (yield from source.peek()) or (key != "" and is_next(key))


def _grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        # arguments are one JSON object: plain text cannot express every schema
        return f"{quoted(f'{name}>')} {_LINE} {calls.arguments(name, schema)} {_LINE} {calls.tag(_FUNCTION_END)}"

    call = f"{calls.tag(_FUNCTION)} {calls.each(write, _NAME)}"
    return f"{calls.several(f'{calls.tag(OPENING)} {_LINE} {call} {_LINE} {calls.tag(CLOSING)}', _LINE)} {_LINE}"


QWEN3_CODER = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: OPENING in template and _FUNCTION in template,
    tags=_TAGS,
    turn_ends=QWEN_TURN_ENDS,
)


_KEY, _KEY_END, _VALUE, _VALUE_END = _GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KEY_ENDS, _GLM_VALUE_MARKS = Marks((_KEY_END,)), Marks((_VALUE, _VALUE_END))
_GLM_NAME_CHAR, _GLM_NAME = re.compile(r"[^<>{\s]"), re.compile(r"[^<>{\s]+")


def _read_glm(source: Source) -> Steps[None]:
    while mark := (yield from source.read_content()):
        if mark == OPENING:
            yield from _read_glm_call(source)


def _read_glm_call(source: Source) -> Steps[None]:
    start = source.at
    yield from source.skip()
    name = yield from source.match(_GLM_NAME_CHAR)
    char = yield from source.skip()
    # a name is a call only before an argument or a closing tag; one JSON object may hold all arguments
    mark = (yield from source.take(_KEY, CLOSING)) if name and char == "<" else ""
    if not mark and not (name and char == "{"):
        source.leave(start)
        return
    source.begin_call(name, start)
    source.add_arguments("")
    if mark:
        yield from _read_glm_arguments(source, (source.tools or {}).get(name, {}), mark)
    elif (yield from stream_arguments(source)):
        yield from source.skip()
        yield from source.take(CLOSING)
        source.end_call()


def _read_glm_arguments(source: Source, schema: Mapping[str, Any], mark: str) -> Steps[None]:
    keys = set[str]()
    while mark == _KEY:
        start = source.at
        yield from source.skip_until(_KEY_ENDS)
        key = source.text[start : source.at].strip()
        yield from source.take(_KEY_END)
        yield from source.skip()
        if not (yield from source.take(_VALUE)):
            return
        start = source.at
        value = yield from _read_glm_value(source)
        if value is None:
            return
        if key not in keys:
            text = _written_json(source.text[start : value.end], property_types(schema, key))
            source.add_arguments(f"{', ' if keys else '{'}{to_json(key)}: {text}")
            keys.add(key)
        mark = value.mark
    source.add_arguments("}" if keys else "{}")
    source.end_call()


class _Value(NamedTuple):
    end: int
    after: int
    mark: str


def _read_glm_value(source: Source) -> Steps[_Value | None]:
    """Pass over a value and the tag after it; None if the value is cut off.

    Values are not escaped, so a value may quote the markup around it. A value ends at a closing tag that closes no value opened
    within it, if a tag that may follow a value or the end of the turn comes next. Otherwise it ends at the first closing tag
    before such a tag.
    """
    value, depth = None, 0
    while tag := (yield from source.skip_until(_GLM_VALUE_MARKS)):
        end = source.at
        source.at = after = end + len(tag)
        if tag == _VALUE:
            depth += 1
            continue
        char = yield from source.skip()
        mark = yield from source.take(_KEY, CLOSING)
        if mark or not char:
            this = _Value(end, source.at, mark)
            value = value or this
            if not depth:
                value = this
                break
        source.at, depth = after, max(0, depth - 1)
    if value is None or (source.cut and not tag):
        source.at = len(source.text)
        return None
    source.at = value.after
    return value


def _glm_grammar(calls: CallGrammar) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        # arguments are one JSON object: plain text cannot express every schema
        return rf'{quoted(name)} "\n" {calls.arguments(name, schema)} "\n"'

    return calls.several(f"{calls.tag(OPENING)} {calls.each(write, _GLM_NAME)} {calls.tag(CLOSING)}", r'"\n"?')


GLM45 = ToolCallFormat(
    read=_read_glm,
    grammar=_glm_grammar,
    detect=lambda template: OPENING in template and _KEY in template,
    tags=(OPENING, CLOSING, *_GLM_TAGS),
    turn_ends=("<|observation|>", "<|user|>", "<|endoftext|>"),
)
