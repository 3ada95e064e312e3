"""What a JSON schema allows, as grammar of the values in Qwen3-Coder's XML: texts as they are, everything else as JSON.

The parser tells from the schema what a text stands for (`schema_values`), so a value that may be a text or something else can
not be written exactly. Knows no calls.
"""

import json
from collections.abc import Mapping
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.parsers.call_schemas import constraints, inner, resolved
from jinfercept.parsers.lark import Rules, one_of, pattern, quoted
from jinfercept.parsers.qwen_xml import FUNCTION_END, PARAMETER, PARAMETER_END
from jinfercept.parsers.schema_values import property_of

_ENDS = (PARAMETER_END, FUNCTION_END, "\n" + PARAMETER)


def qwen_value(rules: Rules, name: str, schema: Mapping[str, Any], closing: str) -> str:
    """The name of a rule for a value and what stands behind it.

    Args:
        rules: it is put into.
        name: of the argument.
        schema: of the value, with the definitions that it refers to.
        closing: text; part of the rule, since a lexer that has to tell a text from it would take it for text.

    Raises:
        RequestError: what the schema says cannot be held to where values are plain text.
    """
    schema = resolved(schema)
    types = {*property_of({"properties": {name: schema}, **schema}, name)["types"]}
    if "string" in types or not types:
        if types <= {"string", "null"}:
            return rules.terminal(f"{one_of(_texts(name, schema))} {quoted(closing)}")
        raise _inexact(name, f"{sorted(types)}")
    return rules.rule(f"{rules.json(schema)} {quoted(closing)}")


def _texts(name: str, schema: Mapping[str, Any]) -> list[str]:
    """Expressions for a text, or null."""
    said = constraints(schema)
    kind = schema.get("type")
    if said == {"anyOf"}:
        options = [resolved(inner(schema, option)) for option in schema["anyOf"]]
        return [text for option in options for text in _texts(name, option)]
    if said - {"type"} in ({"const"}, {"enum"}):
        values = [schema["const"]] if "const" in said else schema["enum"]
        kinds = ["string", "null"] if kind is None else [kind] if isinstance(kind, str) else kind
        return [_choice(name, value) for value in values if ("null" if value is None else "string") in kinds]
    if isinstance(kind, list):
        return [text for one in kind for text in _texts(name, {**schema, "type": one})]
    if kind == "null":
        return [quoted("null")]
    if said <= {"type", "pattern", "minLength", "maxLength", "format"}:
        return [_text(schema)]
    raise _inexact(name, ", ".join(sorted(said - {"type"})))


def _choice(name: str, value: Any) -> str:
    if isinstance(value, str) and not any(end in f"\n{value}\n" for end in _ENDS):
        return quoted(value)
    if value is None:
        return quoted("null")
    raise _inexact(name, repr(value))


def _text(schema: Mapping[str, Any]) -> str:
    """Any text without what ends a value, as long and of the pattern that is asked for."""
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
