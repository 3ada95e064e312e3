"""The names that a pattern of `patternProperties` matches, where they are finitely many."""

import re
from collections.abc import Iterable
from re import _parser  # the syntax tree has no public reader  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from typing import Any

MAX_NAMES = 64
"""Names that are listed for a pattern: each of them gets the pattern's schema."""
_MAX_CHARS = 256
_CATEGORIES = {
    "CATEGORY_DIGIT": "0123456789",
    "CATEGORY_WORD": "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz",
}
_UNICODE_CLASS = re.compile(r"(?<!\\)((?:\\\\)*)\\[pP](?:\{[^}]*\}|\w)")
_NAMED_GROUP = re.compile(r"\(\?<(?=\w)")


def names_of(pattern: str) -> list[str] | None:
    """All names that match; None where their length has no bound, or for a pattern that only llguidance can judge.

    Raises:
        OverflowError: the names have a bound, but are more than `MAX_NAMES`, or longer than names are listed.
    """
    python_pattern = _UNICODE_CLASS.sub(r"\1\\W", pattern)  # \W: as many characters
    try:
        parsed: Any = _parser.parse(_NAMED_GROUP.sub("(?P<", python_pattern))
        most = parsed.getwidth()[1]
        if most >= _parser.MAXREPEAT or not (_is_anchored(parsed, 0) and _is_anchored(parsed, -1)):
            return None
        if most > _MAX_CHARS or parsed.state.flags & re.IGNORECASE:
            raise OverflowError
        return _texts(parsed)
    except (re.error, RecursionError):
        return None


def _is_anchored(parsed: Any, end: int) -> bool:
    if not parsed:
        return False
    kind, argument = parsed[end]
    match str(kind):
        case "AT":
            return str(argument).startswith(("AT_BEGINNING", "AT_END")[end])
        case "SUBPATTERN":
            return _is_anchored(argument[-1], end)
        case "BRANCH":
            return all(_is_anchored(option, end) for option in argument[1])
        case _:
            return False


def _texts(parsed: Any) -> list[str]:
    texts = [""]
    for kind, argument in parsed:
        texts = _limited(text + more for more in _texts_of(str(kind), argument) for text in texts)
    return texts


def _texts_of(kind: str, argument: Any) -> list[str]:
    match kind:
        case "AT" if str(argument).startswith(("AT_BEGINNING", "AT_END")):
            return [""]
        case "AT" | "ASSERT" | "ASSERT_NOT" | "GROUPREF":
            raise re.error("llguidance refuses it")
        case "LITERAL":
            return [chr(argument)]
        case "RANGE":
            return _limited(map(chr, range(argument[0], argument[1] + 1)))
        case "CATEGORY" if str(argument) in _CATEGORIES:
            return [*_CATEGORIES[str(argument)]]
        case "IN":
            return _limited(char for part in argument for char in _texts_of(str(part[0]), part[1]))
        case "BRANCH":
            return _limited(text for option in argument[1] for text in _texts(option))
        case "SUBPATTERN" if not argument[1]:  # flags
            return _texts(argument[-1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, repeated = argument
            texts, parts = [""], _texts(repeated)
            for count in range(most):
                options = parts if count < least else ["", *parts]
                earlier, texts = texts, _limited(text + part for part in options for text in texts)
                if texts == earlier:  # the parts are empty
                    break
            return texts
        case _:  # such as any character
            raise OverflowError


def _limited(texts: Iterable[str]) -> list[str]:
    distinct = dict[str, None]()
    for text in texts:
        distinct[text] = None
        if len(distinct) > MAX_NAMES:
            raise OverflowError
    return [*distinct]
