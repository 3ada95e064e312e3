"""Limits of a client's grammar: characters, rules and repetitions; and an estimate of its memory once compiled."""

import json
import re
from typing import Any

from jinfercept.errors import RequestError

MAX_CHARS = 2**15
"""Characters of a grammar or of a JSON schema."""
MAX_LIST_CHARS = 2**17
"""Characters of a list of choices, and of a grammar for the calls of many tools."""
MAX_RULES = 300
"""Rules of a Lark grammar: llguidance takes two seconds to report a mistake behind so many, ten behind a thousand."""
MAX_GBNF_CHARS = 2**14
"""Characters of a grammar in GBNF, whose translation to Lark takes quadratic time."""
MAX_REPETITIONS = 10_000
"""Bound of `{n,m}` in regular expressions and grammars, and of a schema's lengths: compiling it takes memory and time."""

_BYTES = 2**17
"""Least bytes of a compiled grammar: measured 0.1 MB."""
_BYTES_A_CHAR = 200
"""Bytes of a compiled grammar per character: measured 17 for a long text, 30 for choices, 60 for regular expressions, 190 for
many properties."""
_RULE = re.compile(r"^[ \t]*[!?]?\w[^\n]*:", re.MULTILINE)
_REPETITION = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUND = re.compile(rf'"({"|".join(_BOUNDS)})"\s*:\s*(\d+)')
_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"')
_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_limits(kind: str, text: str) -> None:
    """Raise `RequestError` for a grammar that is too long or repeats something too often; `kind` and `text`: see
    `GrammarSource`."""
    most = MAX_LIST_CHARS if kind in ("choice", "lark") else MAX_CHARS
    if len(text) > most:
        raise RequestError(
            f"structured_outputs.{kind} is too long", got=f"{len(text)} characters", fix=f"at most {most}"
        )
    if kind == "json":
        _check_schema(json.loads(text))
    elif kind == "regex":
        _check_repetitions(kind, text)
    elif kind != "choice":
        for name, number in _BOUND.findall(text):
            _check_number(f"{kind}: {name}", number)
        _check_repetitions(kind, _TEXT.sub("", text))


def check_gbnf(text: str) -> None:
    """Raise `ValueError` for a grammar in GBNF that is too long."""
    if "::=" in text and len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"GBNF of more than {MAX_GBNF_CHARS} characters; write it in Lark")


def check_rules(lark: str) -> None:
    """Raise `ValueError` for too many rules."""
    if len(_RULE.findall(lark)) > MAX_RULES:
        raise ValueError(f"more than {MAX_RULES} rules")


def num_compiled_bytes(text: str) -> int:
    """Bytes that a compiled grammar holds, estimated from its text; rather too many."""
    return _BYTES + _BYTES_A_CHAR * len(text)


def _check_schema(schema: Any) -> None:
    """Check every schema within a schema, but not its values."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, dict):
            continue
        for key, value in one.items():
            if key in _BOUNDS and isinstance(value, int | float):
                _check_number(f"json: {key}", value)
            elif key == "pattern" and isinstance(value, str):
                _check_repetitions("json: pattern", value)
            elif key in _NAMED and isinstance(value, dict):
                left += value.values()
                if key == "patternProperties":
                    for pattern in value:
                        _check_repetitions("json: patternProperties", pattern)
            elif key not in _VALUES:
                left.append(value)


def _check_repetitions(where: str, pattern: str) -> None:
    for numbers in _REPETITION.findall(pattern):
        for number in filter(None, numbers):
            _check_number(f"{where}: repetitions", number)


def _check_number(where: str, number: str | float) -> None:
    too_large = (
        len(number.lstrip("0")) > 9 or int(number) > MAX_REPETITIONS
        if isinstance(number, str)
        else number > MAX_REPETITIONS
    )
    if too_large:
        raise RequestError(
            f"structured_outputs.{where} too large", got=str(number)[:20], fix=f"at most {MAX_REPETITIONS}"
        )
