"""Grammars of calls that are written as tags with plain text between them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.parsers.call_grammars import NAME, CallGrammar, check_name
from jinfercept.parsers.lark import one_of, pattern, quoted
from jinfercept.parsers.schema_values import property_types, types_of
from jinfercept.parsers.tool_schemas import Argument, constraints, inner, named_arguments, resolved
from jinfercept.parsers.xml_calls import XmlTags

XML_NAME = re.compile(r'[^<>\s"]([^<>\n"]*[^<>\s"])?')
_LINE = r'"\n"?'


def xml_grammar(calls: CallGrammar, tags: XmlTags) -> str:
    """The grammar of a turn that has to call."""

    def write(name: str, schema: Mapping[str, Any]) -> str:
        options = (
            [_argument(calls, tags, argument, schema) for argument in option]
            for option in named_arguments(name, schema)
        )
        arguments = one_of(" ".join(option) or '""' for option in options)
        return f"{quoted(name)} {calls.tag(tags.name_end)} {_LINE} {arguments} {calls.tag(tags.function_end)}"

    call = f"{calls.tag(tags.function)} {calls.each(write, XML_NAME if tags.name_end else NAME)}"
    if not tags.outer:
        return f"{calls.several(call, _LINE)} {_LINE}"
    opening, closing = map(calls.tag, tags.outer)
    if tags.one_block:
        return f"{opening} {_LINE} {calls.several(call, _LINE)} {_LINE} {closing} {_LINE}"
    return f"{calls.several(f'{opening} {_LINE} {call} {_LINE} {closing}', _LINE)} {_LINE}"


def _argument(calls: CallGrammar, tags: XmlTags, argument: Argument, whole: Mapping[str, Any]) -> str:
    """An argument: a text as it is, anything else as JSON. Raises `RequestError` as `plain_types` and `check_name` do."""
    key, schema = argument.name, resolved(argument.schema)
    check_name(XML_NAME, key, "argument")
    types = plain_types(key, schema, whole)
    is_text = "string" in types or not types
    start = f"{_LINE} {calls.tag(tags.value_start)}" if tags.value_start else ""
    line = "\n" if tags.padded else ""
    before, closing = calls.divided(tags.parameter_end)
    if is_text:
        ends = (tags.parameter_end, tags.function_end, "\n" + tags.parameter)
        texts = one_of(text_options(key, schema, ends))
        value = calls.rules.terminal(f"{texts} {quoted(line + before) if line + before else ''}")
    else:  # its closing is a part of the rule, since a lexer could not tell it from the value
        value = calls.rules.rule(f"{calls.rules.json(schema)} {quoted(line + before)}")
    opening = f"{calls.tag(tags.parameter)} {quoted(key)} {calls.tag(tags.key_end)}"
    written = f"({opening} {start} {quoted(line) if line else ''} {value} {closing} {_LINE})"
    return written if argument.needed else f"{written}?"


def plain_types(name: str, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> set[str]:
    """The types of a value that is written as plain text if it is a string.

    Readers tell from the whole schema of the arguments whether a value is a text (`schema_values`), so a value that may be a
    text or of another type cannot be written exactly.

    Raises:
        RequestError: plain text cannot express what the schema asks for.
    """
    types = {*types_of(schema, schema)}
    read = types | {*property_types(whole, name)}
    if "string" in read and (not read <= {"string", "null"} or (types and "null" in read - types)):
        raise inexact(name, f"{sorted(read)}")
    return types


def text_options(name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> list[str]:
    """Expressions for a text, or null."""
    keywords = constraints(schema)
    kind = schema.get("type")
    if keywords == {"anyOf"}:
        options = [resolved(inner(schema, option)) for option in schema["anyOf"]]
        return [text for option in options for text in text_options(name, option, ends)]
    if keywords - {"type"} in ({"const"}, {"enum"}):
        values = [schema["const"]] if "const" in keywords else schema["enum"]
        kinds = ["string", "null"] if kind is None else [kind] if isinstance(kind, str) else kind
        return [
            _quoted_choice(name, value, ends) for value in values if ("null" if value is None else "string") in kinds
        ]
    if isinstance(kind, list):
        return [text for option in kind for text in text_options(name, {**schema, "type": option}, ends)]
    if kind == "null":
        return [quoted("null")]
    if keywords <= {"type", "pattern", "minLength", "maxLength", "format"}:
        return [_free_text(schema, ends)]
    raise inexact(name, ", ".join(sorted(keywords - {"type"})))


def _quoted_choice(name: str, value: Any, ends: Sequence[str]) -> str:
    if isinstance(value, str) and not any(end in f"\n{value}\n" for end in ends):
        return quoted(value)
    if value is None:
        return quoted("null")
    raise inexact(name, repr(value))


def _free_text(schema: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Any text without the ends of a value, of the schema's length and pattern."""
    barred = "|".join(re.escape(end) for end in ends)
    parts = [pattern("(?s:.*)"), "~" + pattern(f"(?s:.*)({barred})(?s:.*)")]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if (least, most) != (0, ""):
        parts.append(pattern(f"(?s:.{{{json.dumps(least)},{most}}})"))
    if expression := schema.get("pattern"):
        before = "" if str(expression).startswith("^") else "(?s:.*)"
        after = "" if str(expression).endswith("$") else "(?s:.*)"
        parts.append(pattern(f"{before}({str(expression).removeprefix('^').removesuffix('$')}){after}"))
    return f"({' & '.join(parts)})"


def inexact(name: str, got: str) -> RequestError:
    return RequestError(
        f"the argument {name!r} cannot be written as plain text",
        got=got,
        fix='declare it of one type, or leave the call to the model (tool_choice="auto")',
    )
