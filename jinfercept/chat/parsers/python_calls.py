"""Calls written in Python, `f(a=1)`, parsed with `ast` and never run. Values become JSON."""

import ast
import json
import keyword
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jinfercept.chat.parsers.source import Source, Steps

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The errors that `ast` raises for text that is no Python."""
_NAMES = {"true": True, "false": False, "null": None}


def literal(text: str) -> Any:
    """Evaluate a Python literal; None if it is none, or JSON cannot express it."""
    try:
        return value_of_node(parse_expression(text.strip()))
    except UNREADABLE:
        return None


def value_of_node(node: ast.expr) -> Any:
    """Evaluate a literal that JSON can express, in Python's words or JSON's. Raises `ValueError` for anything else."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [value_of_node(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(key, str) for key in names):
                raise ValueError("a key that is no text")
            if len({*names}) < len(names):
                raise ValueError("a key that comes twice")
            return dict(zip(names, map(value_of_node, values), strict=True))
    raise ValueError("not a literal")


def parse_expression(text: str) -> ast.expr:
    """Parse one expression. Raises an error in `UNREADABLE`."""
    with warnings.catch_warnings(action="ignore"):  # escapes that Python does not know
        return ast.parse(text, mode="eval").body


def to_json(value: Any) -> str:
    """Write JSON as a model would. Raises `ValueError` for numbers that JSON does not have."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written if is_valid_unicode(written) else json.dumps(value, allow_nan=False)


def is_valid_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_CLOSES = {"(": ")", "[": "]", "{": "}"}
_QUOTES = ('"""', "'''", '"', "'")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME_CHAR = re.compile(r"[\w.-]")
_STRING = re.compile(
    r'("""(?:[^\\]|\\.)*?"""|' + r"'''(?:[^\\]|\\.)*?'''|" + r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*')", re.DOTALL
)
_RESERVED = re.compile(rf"\b({'|'.join(keyword.kwlist)})(?=\s*=(?!=))")
_MARK = "reserved_word_"
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[1-9][0-9]*(?![\w.]))")
_RAW = re.compile(r"(\\.)|[\n\r\x00]", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\0": r"\x00"}


class PythonCall(NamedTuple):
    """A call with JSON arguments, and where its text starts and ends in `Source.text`."""

    name: str
    arguments: str
    start: int
    end: int


def read_dotted_call(source: Source) -> Steps[None]:
    """Read `name.call(a=1)`, or leave it to be read again."""
    start = source.at
    call = yield from read_call(source)
    if call and call.name.endswith(".call"):
        write_calls(source, [call._replace(name=call.name.removesuffix(".call"))])
    else:
        source.at = start


def read_literal_call(source: Source) -> Steps[tuple[str, str] | None]:
    """Pass over `{'name': …, 'arguments': {…}}`. Returns name and JSON arguments, or None for other or incomplete text."""
    start = source.at
    if not (yield from _skip_brackets(source)):
        return None
    try:
        value = value_of_node(parse_expression(source.text[start : source.at]))
        name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        return (name, to_json(arguments)) if isinstance(name, str) and name and is_valid_unicode(name) else None
    except (*UNREADABLE, LookupError, TypeError, AttributeError):
        return None


def write_calls(source: Source, calls: list[PythonCall]) -> None:
    """Write calls that were read; reading continues at `at`."""
    offset, last = 0, source.at
    for call in calls:
        source.at = call.end - offset
        source.write_call(call.name, call.start - offset, call.arguments)
        offset = call.end
    source.at = last - offset


def read_call(source: Source, names: Collection[str] | None = None) -> Steps[PythonCall | None]:
    """Pass over `name(…)`; None if there is no such call, or it is cut off.

    The name of an offered tool need not be a Python name: `read-file`.

    Args:
        names: the functions that can be called; None: any.
    """
    start = source.at
    name = yield from source.match(_NAME_CHAR)
    offered = source.tools or ()
    if name not in (offered if names is None else names) and (names is not None or not _NAME.fullmatch(name)):
        return None
    if (yield from source.skip()) == "(" and (yield from _skip_brackets(source)):
        try:
            return PythonCall(*parse_call(source.text[start : source.at], offered=offered), start, source.at)
        except UNREADABLE:
            pass
    return None


def _skip_brackets(source: Source) -> Steps[bool]:
    closing: list[str] = []
    while char := (yield from source.peek()):
        if char in "\"'":
            if not (yield from _skip_string(source)):
                return False
            continue
        source.at += 1
        if char in _CLOSES:
            closing.append(_CLOSES[char])
        elif char in _CLOSES.values():
            if char != closing.pop():
                return False
            if not closing:
                return True
    return False


def _skip_string(source: Source) -> Steps[bool]:
    quote = ""
    for text in _QUOTES:  # one after the other: `"` may become `"""`
        quote = quote or (yield from source.take(text))
    while char := (yield from source.peek()):
        if char == quote[0] and (yield from source.take(quote)):
            return True
        source.at += 1
        if char == "\\" and (yield from source.peek()):
            source.at += 1
    return False


def _as_python(text: str) -> str:
    # models write what Python refuses: `from=`, `07`, and strings over several lines
    pieces = _STRING.split(text)
    pieces[::2] = [_LEADING_ZEROS.sub("", _RESERVED.sub(rf"{_MARK}\1", piece)) for piece in pieces[::2]]
    pieces[1::2] = [_RAW.sub(lambda raw: raw[1] or _ESCAPES[raw[0]], piece) for piece in pieces[1::2]]
    return "".join(pieces)


def parse_call(
    text: str, parameters: Mapping[str, Sequence[str]] | None = None, offered: Collection[str] = ()
) -> tuple[str, str]:
    """Parse a call into its name and JSON arguments. Raises an error in `UNREADABLE`.

    Args:
        parameters: names of parameters by function, for arguments without names; None: all arguments need names.
        offered: names of functions that need not be Python names.
    """
    start = text.index("(")
    name = text[:start].strip()
    function = "function" if name in offered else name
    call = parse_expression(_as_python(function + text[start:]))
    if not isinstance(call, ast.Call) or not _NAME.fullmatch(function) or ast.unparse(call.func) != function:
        raise ValueError("not a call with keyword arguments")
    names = (parameters or {}).get(name, ())
    if len(call.args) > len(names):
        raise ValueError("more arguments than it has" if names else "arguments that are not named")
    arguments: dict[str, Any] = dict(zip(names, map(value_of_node, call.args), strict=False))
    for argument in call.keywords:
        if argument.arg is None:
            raise ValueError("arguments that are not named")
        key = argument.arg.removeprefix(_MARK)
        if key in arguments:
            raise ValueError(f"two values of {key}")
        arguments[key] = value_of_node(argument.value)
    return name, to_json(arguments)
