"""Python literals as JSON values, read with `ast` and never run."""

import ast
import json
import warnings
from typing import Any

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The errors that `ast` raises for text that is no Python."""
_NAMES = {"true": True, "false": False, "null": None}


def literal(text: str) -> Any:
    """The value of a Python literal, if JSON can express it; None otherwise."""
    try:
        return value_of_node(parse_expression(text.strip()))
    except UNREADABLE:
        return None


def value_of_node(node: ast.expr) -> Any:
    """The value of a literal that JSON can express, in Python's words or JSON's. Raises ValueError for anything else."""
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
    """The syntax tree of one expression. Raises an error of `UNREADABLE`."""
    with warnings.catch_warnings(action="ignore"):  # escapes that Python does not know
        return ast.parse(text, mode="eval").body


def to_json(value: Any) -> str:
    """JSON as a model would write it. Raises ValueError for numbers that JSON does not know."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written if is_valid_unicode(written) else json.dumps(value, allow_nan=False)


def is_valid_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
