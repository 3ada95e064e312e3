"""MiniMax M3: `<invoke name="name"><key>value</key></invoke>`, each tag behind a special token, objects and lists too.

Arguments become JSON when a call is complete. Lists are of `<item>`s; texts stand as they are, without escapes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from jinfercept.parsers.call_grammars import CallGrammar, check_name
from jinfercept.parsers.lark import one_of, quoted
from jinfercept.parsers.python_literals import to_json
from jinfercept.parsers.schema_values import item_schema, may_have, member_schema, types_of, value_of
from jinfercept.parsers.source import Marks, Source, Steps
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.tool_schemas import constraints, inner, named_arguments, resolved
from jinfercept.parsers.xml_grammar import XML_NAME, plain_types, text_options

_TOKEN = "]<]minimax[>["
_TOKENS = (_TOKEN, "<tool_call>", "</tool_call>", "</invoke>")
_OPENING, _CLOSING = f"{_TOKEN}<tool_call>", f"{_TOKEN}</tool_call>"
_INVOKE, _INVOKE_END = f'{_TOKEN}<invoke name="', f"{_TOKEN}</invoke>"
_TURN_ENDS = ("[e~[",)
_CALL_MARKS = Marks((_INVOKE, _INVOKE_END))
_NAME_CHAR = re.compile(r'[^<>\n"]')
_KEY = re.compile(r"[\w.:$@-]+")
_TAG = re.compile(re.escape(_TOKEN) + r"<([^<>/\n][^<>\n]*)>")
_NEXT_TAG = re.compile(rf"\s*(?:\Z|{_TAG.pattern})")
_ITEM = "item"
_NESTED = ("array", "object")


def _read(source: Source) -> Steps[None]:
    """Read a turn. A call that is cut off where the turn ends is dropped; a tag without the name of a tool is too."""
    while mark := (yield from source.read_content()):
        if mark != _INVOKE:
            continue
        start = source.at
        name = (yield from source.match(_NAME_CHAR)).strip()
        if name and (yield from source.take('">')):
            begin = source.at
            end = yield from _skip_call(source)
            if end is None:
                source.drop_rest()
                continue
            arguments = _arguments(source.text[begin:end], (source.tools or {}).get(name, {}))
            source.write_call(name, start, arguments)
        else:
            source.leave(start)


def _skip_call(source: Source) -> Steps[int | None]:
    """Pass over a call; returns where its arguments end, None if it is cut off.

    It ends at a tag that closes no call opened within it, before a tag that may follow it; where there is none, at the first
    before such a tag.
    """
    num_calls = 0  # opened within
    first_end: tuple[int, int] | None = None  # of the arguments, and of the tag behind them
    while mark := (yield from source.skip_until(_CALL_MARKS)):
        end, after = source.at, source.at + len(mark)
        source.at = after
        if mark == _INVOKE:
            named = (yield from source.match(_NAME_CHAR)) and (yield from source.take('">'))
            num_calls += bool(named)
        else:
            may_end = not (yield from source.skip()) or (
                yield from source.take(_INVOKE, _OPENING, _CLOSING, *_TURN_ENDS)
            )
            first_end = first_end or ((end, after) if may_end else None)
            if may_end and not num_calls:
                first_end = end, after
                break
            num_calls = max(0, num_calls - 1)
        source.at = after
    if first_end is None or (source.cut and not mark):
        return None
    end, source.at = first_end
    return end


def _arguments(text: str, schema: Mapping[str, Any]) -> str:
    """The arguments in a call as JSON; one that JSON cannot express as a string."""
    arguments: dict[str, Any] = {}
    for key, value in _fields(text, schema, schema):
        arguments[key] = value
        with suppress(ValueError, RecursionError):
            typed_value = _value(value, member_schema(schema, key, schema), schema)
            to_json(typed_value)
            arguments[key] = typed_value
    return to_json(arguments)


def _value(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A value of the types in its schema; tags in it are an object or a list unless it has to be something else."""
    types = types_of(schema, root)
    nested = [kind for kind in types if kind in _NESTED] if types else _NESTED
    first = _TAG.match(text.lstrip())
    if not nested or (text.strip() and first is None):
        return value_of(text, types)
    if not text.strip():
        return text if "string" in types or not types else [] if nested[0] == "array" else {}
    assert first is not None
    if "array" in nested and ("object" not in nested or first[1] == _ITEM):
        items = [value for _, value in _fields(text, None, root)]
        return [_value(value, item_schema(schema, index, root), root) for index, value in enumerate(items)]
    return {key: _value(value, member_schema(schema, key, root), root) for key, value in _fields(text, schema, root)}


def _fields(text: str, schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and values of the tags that follow each other in a text, each key once; text between them is dropped.

    Args:
        schema: of the object; None: it is a list.
    """
    keys: set[str] = set()

    def is_next(key: str) -> bool:
        return key == _ITEM if schema is None else key not in keys and (not keys or may_have(schema, key, root))

    at = 0
    while tag := _TAG.search(text, at):
        at = tag.end()
        if is_next(tag[1]):
            keys.add(tag[1])
            end, at = _value_end(text, at, tag[1], is_next)
            yield tag[1], text[tag.end() : end]


def _value_end(text: str, at: int, key: str, is_next: Callable[[str], bool]) -> tuple[int, int]:
    """The end of a value, and of the tag that closes it, found as the end of a call is; the rest if there is no such tag."""
    num_opened = 0
    first_end: tuple[int, int] | None = None
    for tag in re.compile(f"{re.escape(_TOKEN)}<(/?){re.escape(key)}>").finditer(text, at):
        if not tag[1]:
            num_opened += 1
            continue
        following = _NEXT_TAG.match(text, tag.end())
        if following is not None and (following[1] is None or is_next(following[1])):
            first_end = first_end or tag.span()
            if not num_opened:
                return tag.span()
        num_opened = max(0, num_opened - 1)
    return first_end or (len(text), len(text))


def _grammar(calls: CallGrammar) -> str:
    """The grammar of a turn that has to call. Plain objects and lists are tags; those with other constraints are JSON."""

    def write(name: str, schema: Mapping[str, Any]) -> str:
        options = (
            " ".join(_member(calls, *argument, schema) for argument in option) or '""'
            for option in named_arguments(name, schema)
        )
        return " ".join((quoted(f'{name}">'), one_of(options), calls.tag(_INVOKE_END, _TOKENS)))

    opening, invoke, closing = (calls.tag(tag, _TOKENS) for tag in (_OPENING, _INVOKE, _CLOSING))
    call = f"{invoke} {calls.each(write, XML_NAME)}"
    return rf'{opening} "\n" {calls.several(call, r'"\n"')} "\n" {closing}'


def _member(calls: CallGrammar, key: str, schema: Mapping[str, Any], needed: bool, whole: Mapping[str, Any]) -> str:
    """A value between its tags. Raises `RequestError` if plain text cannot express what the schema asks for."""
    check_name(_KEY, key, "argument")
    schema = resolved(schema)
    types = plain_types(key, schema, whole)
    before, closing = calls.divided(f"{_TOKEN}</{key}>", _TOKENS)
    end = quoted(before) if before else ""
    if "string" in types or not types:
        value = calls.rules.terminal(f"{one_of(text_options(key, schema, (_TOKEN,)))} {end}")
    else:
        value = calls.rules.rule(f"{_value_rule(calls, schema)} {end}")
    member = f"{calls.tag(f'{_TOKEN}<{key}>', _TOKENS)} {value} {closing}"
    return member if needed else f"({member})?"


def _value_rule(calls: CallGrammar, schema: Mapping[str, Any]) -> str:
    """The rule of a value: an object or a list in tags, or JSON where tags cannot say its schema; written once for each."""
    keywords, kind = constraints(schema), schema.get("type")
    items, properties, needed = schema.get("items"), schema.get("properties"), schema.get("required", [])
    is_list = kind == "array" and keywords <= {"type", "items", "minItems", "maxItems"}
    is_object = kind == "object" and keywords <= {"type", "properties", "required", "additionalProperties"}
    rules, identity = calls.rules, json.dumps([_TOKEN, schema])
    if name := rules.references.get(identity):
        return name
    name = rules.references[identity] = rules.name()
    if is_list and isinstance(items, Mapping):
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        item = _member(calls, _ITEM, inner(schema, items), True, {})
        body = f"({item}){{{least},{most}}}" if (least, most) != (0, 0) else ""  # a repetition is of one at least
    elif (
        is_object
        and isinstance(properties, Mapping)
        and {*needed} <= {*filter(_KEY.fullmatch, properties)} == {*properties}
    ):
        body = " ".join(_member(calls, key, inner(schema, part), key in needed, {}) for key, part in properties.items())
    else:
        body = rules.json(schema)
    rules.define(name, body or '""')
    return name


MINIMAX_M3 = ToolCallFormat(
    read=_read,
    grammar=_grammar,
    detect=lambda template: _TOKEN in template,
    tags=(_OPENING, _CLOSING, _INVOKE, _INVOKE_END),
    turn_ends=_TURN_ENDS,
    tokens=_TOKENS,
)
