"""Limits of a client's grammar: characters, rules, multiples and patterns; and an estimate of its memory once compiled.

Repetitions need no limit: llguidance counts them, and its own limits end a grammar that becomes too complex.
"""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.structured_outputs import at_reference

MAX_CHARS = 2**15
"""Characters of a grammar or of a JSON schema."""
MAX_LIST_CHARS = 2**17
"""Characters of a list of choices, and of a grammar for the calls of many tools."""
MAX_RULES = 300
"""Rules of a Lark grammar: llguidance takes two seconds to report a mistake behind so many, ten behind a thousand."""
MAX_GBNF_CHARS = 2**14
"""Characters of a grammar in GBNF, whose translation to Lark takes quadratic time."""
MAX_MULTIPLE = 10_000
"""Bound of the least common multiple of all `multipleOf` of a schema, at their finest decimal place: compiling takes time and
memory in proportion (0.6 s and 90 MiB at 99,999)."""
MAX_INTERSECTIONS = 8
"""Patterns that one text may have to match at a time: compiling takes 1.8 times as long for each (6 s for 14 of them)."""

_BYTES = 2**17
"""Least bytes of a compiled grammar: measured 0.1 MB."""
_BYTES_A_CHAR = 200
"""Bytes of a compiled grammar per character: measured 17 for a long text, 30 for choices, 60 for regular expressions, 190 for
many properties."""
_RULE = re.compile(r"^[ \t]*[!?]?\w[^\n]*:", re.MULTILINE)
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?\d[\d.]*(?:[eE][-+]?\d+)?)')
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_limits(kind: str, text: str) -> None:
    """Raise `RequestError` for a grammar that is too long, or takes too long to compile.

    Args:
        kind: as llguidance calls it, or one of `structured_outputs.KINDS`.
    """
    most = MAX_LIST_CHARS if kind in ("choice", "lark") else MAX_CHARS
    if len(text) > most:
        raise RequestError(
            f"structured_outputs.{kind} is too long", got=f"{len(text)} characters", fix=f"at most {most}"
        )
    try:
        text.encode()
        if kind == "json":
            json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        got = ascii(text[:80])
        raise RequestError(f"structured_outputs.{kind} has half a character", got=got, fix="send whole ones") from None
    if kind == "json":
        _check_whole_schema(json.loads(text))
    elif kind in ("grammar", "lark"):
        _check_intersections(kind, _LITERAL.sub("", text).count("&"))
        for schema in _embedded_schemas(text):
            _check_whole_schema(schema)


def check_gbnf(text: str) -> None:
    """Raise `ValueError` for a grammar in GBNF that is too long."""
    if "::=" in text and len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"GBNF of more than {MAX_GBNF_CHARS} characters; write it in Lark")


def check_rules(lark: str) -> None:
    """Raise `ValueError` for too many rules."""
    if len(_RULE.findall(lark)) > MAX_RULES:
        raise ValueError(f"more than {MAX_RULES} rules")


def num_compiled_bytes(text: str) -> int:
    """Estimate the bytes of a compiled grammar from its text, rather too many."""
    return _BYTES + _BYTES_A_CHAR * len(text)


def _embedded_schemas(lark: str) -> Iterator[Any]:
    for directive in re.finditer(r"%json\s*", lark):
        try:
            yield json.JSONDecoder().raw_decode(lark, directive.end())[0]
        except ValueError:  # text that is no JSON is left to the compiler
            continue


def _check_whole_schema(schema: Any) -> None:
    _check_multiples(schema)
    _check_intersections("json", _num_patterns(schema))


def _check_multiples(schema: Any) -> None:
    texts = _MULTIPLE.findall(json.dumps(schema))
    numbers = [abs(Fraction(text)) for text in texts]
    finest = math.lcm(*(number.denominator for number in numbers))
    common = math.lcm(*(int(number * finest) for number in numbers if number > 0))
    if common > MAX_MULTIPLE:
        raise RequestError(
            "structured_outputs.json: multipleOf too large",
            got=", ".join(texts)[:80],
            fix=f"numbers whose least common multiple is at most {MAX_MULTIPLE} of their finest decimal place",
        )


def _check_intersections(where: str, number: int) -> None:
    if number > MAX_INTERSECTIONS:
        raise RequestError(
            f"structured_outputs.{where} combines too many patterns", got=number, fix=f"at most {MAX_INTERSECTIONS}"
        )


def _num_patterns(schema: Any) -> int:
    # an upper estimate of the patterns that one text has to match at the same time
    counts: dict[int, int] = {}  # by the identity of a part, once its own parts are there
    opened, stack = set[int](), [schema]
    while stack:
        part = stack[-1]
        together, apart = _parts(part, schema)
        if id(part) not in opened:  # its parts first; those that are open are around it, in a circle of references
            opened.add(id(part))
            stack += [inner for inner in (*together, *apart) if id(inner) not in opened]
            continue
        stack.pop()
        own = isinstance(part, dict) and ("pattern" in part or "format" in part)
        added = sum(counts.get(id(inner), 0) for inner in together)
        counts.setdefault(id(part), own + added + max((counts.get(id(inner), 0) for inner in apart), default=0))
    return counts[id(schema)]


def _parts(part: Any, schema: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(part, list):
        return [], [inner for inner in part if isinstance(inner, dict | list)]
    if not isinstance(part, dict):
        return [], []
    # a text matches all parts in `together`, but only one of those in `apart`
    together, apart = [], []
    for key, value in part.items():
        if key == "allOf" and isinstance(value, list):
            together += value
        elif key == "$ref" and isinstance(value, str):
            together.append(at_reference(value, schema))
        elif key in ("anyOf", "oneOf"):
            together.append(value)
        elif key in _NAMED and isinstance(value, dict):
            apart += value.values()
        elif key not in _VALUES:
            apart.append(value)
    return [inner for inner in together if isinstance(inner, dict | list)], [
        inner for inner in apart if isinstance(inner, dict | list)
    ]
