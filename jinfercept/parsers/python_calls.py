"""Calls written in Python, taken apart with `ast` and never run; values become JSON. Knows no tags."""

import ast
import json
import keyword
import re
import warnings
from typing import Any, NamedTuple

from jinfercept.parsers.source import Source, Steps

_CLOSES = {"(": ")", "[": "]", "{": "}"}
_LITERALS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME_CHAR = re.compile(r"[\w.]")
_STRING = re.compile(
    r'("""(?:[^\\]|\\.)*?"""|' + r"'''(?:[^\\]|\\.)*?'''|" + r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*')", re.DOTALL
)
_RESERVED = re.compile(rf"\b({'|'.join(keyword.kwlist)})(?=\s*=(?!=))")
_MARK = "reserved_word_"
_UNSOUND = (SyntaxError, ValueError, RecursionError, MemoryError)  # what `ast` makes of text that is no Python


class _Spoken(NamedTuple):
    """A call whose text goes from `start` to `end`."""

    name: str
    arguments: str
    start: int
    end: int


def read_call_list(source: Source, tagged: bool) -> Steps[None]:
    """Read `[f(a=1), …]` after white space, or leave all of it to be read again.

    Args:
        tagged: what is cut off is dropped, instead of left.
    """
    start = source.at
    if (yield from source.skip()) == "[":
        calls = yield from _read_list(source)
        if calls:
            _say(source, calls)
            return
    if tagged and source.ended and source.at == len(source.text):
        source.drop()
    else:
        source.at = start


def _read_list(source: Source) -> Steps[list[_Spoken]]:
    """Pass over the list that opens here; its calls, or none if anything else is in it."""
    source.at += 1
    calls: list[_Spoken] = []
    while (yield from source.skip()) != "]":
        call = yield from _read_call(source)
        if call is None:
            return []
        calls.append(call)
        char = yield from source.skip()
        if char == ",":
            source.at += 1
        elif char != "]":
            return []
    source.at += 1
    return calls


def read_dotted_call(source: Source) -> Steps[None]:
    """Read `name.call(a=1)`, or leave it to be read again."""
    start = source.at
    call = yield from _read_call(source)
    if call and call.name.endswith(".call"):
        _say(source, [call._replace(name=call.name.removesuffix(".call"))])
    else:
        source.at = start


def read_literal_call(source: Source) -> Steps[tuple[str, str] | None]:
    """Pass over `{'name': …, 'arguments': {…}}`; name and JSON arguments, or None if it is cut off or nothing of the kind."""
    start = source.at
    if not (yield from _skip_brackets(source)):
        return None
    try:
        value = _value(_expression(source.text[start : source.at]))
        name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        return (name, to_json(arguments)) if isinstance(name, str) and name and _is_sound(name) else None
    except (*_UNSOUND, LookupError, TypeError, AttributeError):
        return None


def literal(text: str) -> Any:
    """What a Python literal says, as far as JSON can say it too; None if it is something else."""
    try:
        return _value(_expression(text.strip()))
    except _UNSOUND:
        return None


def _say(source: Source, calls: list[_Spoken]) -> None:
    """Write the calls; `at` is where the text goes on."""
    done, last = 0, source.at
    for call in calls:
        source.at = call.end - done
        source.begin(call.name, call.start - done)
        source.argue(call.arguments)
        source.end()
        done = call.end
    source.at = last - done


def _read_call(source: Source) -> Steps[_Spoken | None]:
    """Pass over `name(…)`; None if that is not what comes, or is cut off."""
    start = source.at
    yield from source.match(_NAME_CHAR)
    if (yield from source.skip()) == "(" and (yield from _skip_brackets(source)):
        try:
            return _Spoken(*_parse(source.text[start : source.at]), start, source.at)
        except _UNSOUND:
            pass
    return None


def _skip_brackets(source: Source) -> Steps[bool]:
    """Pass over the bracket that opens here and all that it holds; False if it never closes, or not as in Python."""
    closing: list[str] = []
    quote = ""
    while char := (yield from source.peek()):
        if quote and (yield from source.take(quote)):
            quote = ""
            continue
        if not quote and char in "\"'":
            quote = (yield from source.take('"""', "'''")) or (yield from source.take(char))
            continue
        source.at += 1
        if quote:
            if char == "\\" and (yield from source.peek()):
                source.at += 1
            elif char == "\n" and len(quote) == 1:
                return False
        elif char in _CLOSES:
            closing.append(_CLOSES[char])
        elif char in ")]}":
            if char != closing.pop():
                return False
            if not closing:
                return True
    return False


def _parse(text: str) -> tuple[str, str]:
    """Name and JSON arguments of a call. Raises ValueError, SyntaxError and what `ast` makes of too deep a nesting."""
    name = text[: text.index("(")].strip()
    pieces = _STRING.split(text)
    pieces[::2] = [_RESERVED.sub(rf"{_MARK}\1", piece) for piece in pieces[::2]]  # `from=` is no Python
    call = _expression("".join(pieces))
    if not isinstance(call, ast.Call) or call.args or not _NAME.fullmatch(name):
        raise ValueError("not a call with keyword arguments")
    arguments: dict[str, Any] = {}
    for argument in call.keywords:
        if argument.arg is None:
            raise ValueError("arguments that are not named")
        arguments[argument.arg.removeprefix(_MARK)] = _value(argument.value)
    return name, to_json(arguments)


def _expression(text: str) -> ast.expr:
    with warnings.catch_warnings(action="ignore"):  # escapes that Python does not know
        return ast.parse(text, mode="eval").body


def to_json(value: Any) -> str:
    """JSON as a model would write it. Raises ValueError for numbers that JSON does not know."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written if _is_sound(written) else json.dumps(value, allow_nan=False)


def _is_sound(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _value(node: ast.expr) -> Any:
    """What JSON can say of a literal; Python's names for it or JSON's. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(key, str) for key in names):
                raise ValueError("a key that is no text")
            return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("not a literal")
