"""Grammars of calls that are written as tags with plain text between them. Knows no family."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.parsers.call_grammars import CallGrammar, check_name
from jinfercept.parsers.lark import one_of, pattern, quoted
from jinfercept.parsers.schema_values import property_types
from jinfercept.parsers.tool_schemas import constraints, inner, named_arguments, resolved
from jinfercept.parsers.xml_calls import XmlTags

_WHOLE_NAME = re.compile(r'[^<>\s"]([^<>\n"]*[^<>\s"])?')
_BARE_NAME = re.compile(r"[\w.:/-]+")
_LINE = r'"\n"?'


def xml_grammar(calls: CallGrammar, tags: XmlTags) -> str:
    """The grammar of a turn that has to call."""

    def write(name: str, schema: Mapping[str, Any]) -> str:
        parts = [f"{quoted(name)} {_tag(calls, tags, tags.name_end)} {_LINE}"]
        for key, value, needed in named_arguments(name, schema):
            check_name(_WHOLE_NAME, key, "argument")
            parts.append(f"({_argument(calls, tags, key, value)} {_LINE})" + ("" if needed else "?"))
        return " ".join((*parts, _tag(calls, tags, tags.function_end)))

    names = _WHOLE_NAME if tags.name_end else _BARE_NAME
    call = f"{_tag(calls, tags, tags.function)} {calls.each(write, names)}"
    if not tags.outer:
        return f"{calls.several(call, _LINE)} {_LINE}"
    opening, closing = (_tag(calls, tags, tag) for tag in tags.outer[:2])
    if tags.one_block:
        return f"{opening} {_LINE} {calls.several(call, _LINE)} {_LINE} {closing} {_LINE}"
    return f"{calls.several(f'{opening} {_LINE} {call} {_LINE} {closing}', _LINE)} {_LINE}"


def _argument(calls: CallGrammar, tags: XmlTags, key: str, schema: Mapping[str, Any]) -> str:
    """An argument: a text as it is, anything else as JSON.

    The reader tells from the schema whether a value is a text (`schema_values`), so a value that may be a text or of another
    type cannot be written exactly.

    Raises:
        RequestError: plain text cannot express what the schema asks for.
    """
    schema = resolved(schema)
    types = {*property_types({"properties": {key: schema}, **schema}, key)}
    is_text = "string" in types or not types
    if is_text and not types <= {"string", "null"}:
        raise _inexact(key, f"{sorted(types)}")
    kinds = ("", "string" if is_text else "other")
    key_end = next(end for end, kind in tags.key_ends.items() if kind in kinds)
    start = f"{_LINE} {_tag(calls, tags, tags.value_start)}" if tags.value_start else ""
    line = "\n" if tags.padded else ""
    before, closing = _divided(calls, tags, tags.parameter_end)
    if is_text:
        ends = (tags.parameter_end, tags.function_end, "\n" + tags.parameter)
        texts = one_of(_text_options(key, schema, ends))
        value = calls.rules.terminal(f"{texts} {quoted(line + before)}")
    else:  # its closing is a part of the rule, since a lexer could not tell it from the value
        value = calls.rules.rule(f"{calls.rules.json(schema)} {quoted(line + before)}")
    opening = f"{_tag(calls, tags, tags.parameter)} {quoted(key)} {_tag(calls, tags, key_end)}"
    return f"{opening} {start} {quoted(line) if line else ''} {value} {closing}"


def _tag(calls: CallGrammar, tags: XmlTags, text: str) -> str:
    """The expression that stands for a tag, or for nothing."""
    before, rest = _divided(calls, tags, text)
    return f"{quoted(before) if before else ''} {rest}".strip()


def _divided(calls: CallGrammar, tags: XmlTags, text: str) -> tuple[str, str]:
    """The text of a tag before its first token, and an expression for the rest."""
    if not text or calls.token_of(text) is not None:
        return "", calls.tag(text) if text else ""
    if tags.token in text and tags.token and calls.token_of(tags.token) is not None:
        before, after = text.split(tags.token, 1)
        return before, f"{calls.tag(tags.token)} {quoted(after)}"
    return text, ""


def _text_options(name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> list[str]:
    """Expressions for a text, or null."""
    keywords = constraints(schema)
    kind = schema.get("type")
    if keywords == {"anyOf"}:
        options = [resolved(inner(schema, option)) for option in schema["anyOf"]]
        return [text for option in options for text in _text_options(name, option, ends)]
    if keywords - {"type"} in ({"const"}, {"enum"}):
        values = [schema["const"]] if "const" in keywords else schema["enum"]
        kinds = ["string", "null"] if kind is None else [kind] if isinstance(kind, str) else kind
        return [
            _quoted_choice(name, value, ends) for value in values if ("null" if value is None else "string") in kinds
        ]
    if isinstance(kind, list):
        return [text for option in kind for text in _text_options(name, {**schema, "type": option}, ends)]
    if kind == "null":
        return [quoted("null")]
    if keywords <= {"type", "pattern", "minLength", "maxLength", "format"}:
        return [_free_text(schema, ends)]
    raise _inexact(name, ", ".join(sorted(keywords - {"type"})))


def _quoted_choice(name: str, value: Any, ends: Sequence[str]) -> str:
    if isinstance(value, str) and not any(end in f"\n{value}\n" for end in ends):
        return quoted(value)
    if value is None:
        return quoted("null")
    raise _inexact(name, repr(value))


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


def _inexact(name: str, got: str) -> RequestError:
    return RequestError(
        f"the argument {name!r} cannot be written as plain text",
        got=got,
        fix='declare it of one type, or leave the call to the model (tool_choice="auto")',
    )
