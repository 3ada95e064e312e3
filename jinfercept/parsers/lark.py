"""Builds grammars in llguidance's variant of Lark from rules.

An expression is text that may stand in a rule; rules and terminals get unused names.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, final

from jinfercept.parsers.tool_schemas import bounded
from jinfercept.structured_outputs import JSON_SPACE


@final
class Rules:
    """The rules of one grammar.

    Attributes:
        references: names of rules by the definition that they stand for, so that a schema may refer to itself.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_names = 0
        self.references: dict[str, str] = {}

    def name(self) -> str:
        """A new name for a rule that `define` defines later."""
        self._num_names += 1
        return f"rule{self._num_names}"

    def define(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def rule(self, body: str) -> str:
        """A new rule; returns its name."""
        name = self.name()
        self.define(name, body)
        return name

    def terminal(self, body: str) -> str:
        """A new terminal, whose body may have `&` and `~` too; returns its name."""
        name = self.name().upper()
        self.define(name, body)
        return name

    def begins(self, text: str) -> str:
        """A new rule for any text that ends where a text first stands in it; returns its name."""
        name = self.name()
        self._lines.append(f"{name}[lazy]: {pattern(f'(?s:.*){re.escape(text)}')}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value that a schema allows; see `bounded`."""
        guided = {**bounded(schema), "x-guidance": {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}}
        return self.rule("%json " + json.dumps(guided, ensure_ascii=False))

    def listed(self, members: Iterable[tuple[str, bool]], separator: str) -> str:
        """Members in their order, with a separator between two of them.

        Args:
            members: expressions, and whether each is required.
        """
        first = more = self.rule('""')
        for member, needed in reversed([*members]):
            name = self.rule(member)
            first = self.rule(f"{name} {more}" + ("" if needed else f" | {first}"))
            more = self.rule(f"({separator} {name}){'' if needed else '?'} {more}")
        return first

    def text(self, start: str) -> str:
        """The whole grammar.

        Args:
            start: the expression that the whole text matches.
        """
        return "\n".join((f"start: {start}", *self._lines))


def quoted(text: str) -> str:
    """The expression that stands for a text."""
    return json.dumps(text, ensure_ascii=False)


def pattern(expression: str) -> str:
    """The expression that stands for a regular expression, in which a dot is any character but a line break."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", r"\n") + "/"


def one_of(options: Iterable[str]) -> str:
    """The expression that stands for any of several."""
    return f"({' | '.join(dict.fromkeys(options))})"
