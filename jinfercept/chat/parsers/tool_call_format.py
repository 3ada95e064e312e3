"""`ToolCallFormat`: how one model family writes its tool calls, and the grammars of turns that have to call.

Such a turn consists of calls only: tags, names of tools, and arguments that fit their JSON schemas, in the order in which they
are declared. `Rules` builds grammars in llguidance's variant of Lark from expressions, which are texts that may stand in a
rule. `formats.FORMATS` has all formats.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinfercept.chat.parsers.source import CallParser, Marks, Source, Steps, ToolSchemas
from jinfercept.errors import RequestError, shown
from jinfercept.structured_outputs import JSON_SPACE

_ANNOTATIONS = {
    *("$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "strict", "title"),
    "writeOnly",
}
_DEFINITIONS = {"$defs", "definitions"}
_COMBINING = {"$ref", "allOf", "anyOf", "else", "if", "oneOf", "then"}


def constraints(schema: Mapping[str, Any]) -> set[str]:
    return {*schema} - _ANNOTATIONS - _DEFINITIONS


def arguments_schema(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete the schema of a tool's arguments: it allows only declared properties, unless it explicitly allows more.

    Raises `RequestError` if the schema is not that of an object.

    Args:
        schema: as it was declared; an empty one takes no arguments.
    """
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"the arguments of tool {name!r} are no object",
            got=shown(schema["type"]),
            fix='declare them as {"type": "object", "properties": {…}}',
        )
    keywords = constraints(schema)
    if keywords and ("properties" not in keywords or keywords & {*_COMBINING, "additionalProperties"}):
        return {"type": "object", **schema}
    return {"properties": {}, **schema, "type": "object", "additionalProperties": False}


@final
class Rules:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, whose body may use `&` and `~` too, and return its name."""
        name = f"TERMINAL{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def begins(self, text: str) -> str:
        """Add a rule for any text up to the first occurrence of `text`, and return its name."""
        return self.rule(pattern(f"(?s:.*){re.escape(text)}"), "[lazy]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON values that a schema allows, and return its name."""
        guided = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}}
        return self.rule("%json " + json.dumps(guided, ensure_ascii=False))

    def text(self, start: str) -> str:
        """Write the whole grammar, given the expression that the whole text matches."""
        return "\n".join((f"start: {start}", *self._lines))


def quoted(text: str) -> str:
    """Write the expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def pattern(expression: str) -> str:
    """Write the expression for a regular expression, in which a dot matches any character except a line break."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", r"\n") + "/"


def one_of(options: Iterable[str]) -> str:
    """Write the expression for any of several expressions."""
    return f"({' | '.join(dict.fromkeys(options))})"


type TokenOf = Callable[[str], int | None]
"""The id of the token that a tag is; None if it is written as text."""

NAME_CHAR, NAME = re.compile(r"[\w.:/-]"), re.compile(r"[\w.:/-]+")
"""The names of tools that can stand beside tags."""
JSON_NAME = re.compile(r'[^<\[\n"\\\x00-\x1F]+')
"""Those that can stand in a call that is a JSON object."""


@final
@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a turn that has to call, while a format writes it."""

    rules: Rules  # written so far
    tools: Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by name of the tool
    token_of: TokenOf
    template: str  # the chat template's source
    parallel: bool  # several calls are allowed

    def tag(self, text: str) -> str:
        """Write a tag as its token, or as text if it has none."""
        token = self.token_of(text)
        return quoted(text) if token is None else f"<[{token}]>"

    def tagged(self, opening: str, body: str) -> str:
        """Write an expression that a tag may precede, if the tag has a token."""
        return body if self.token_of(opening) is None else one_of((body, f"{self.tag(opening)} {body}"))

    def several(self, call: str, between: str) -> str:
        """Write one or, if allowed, several calls."""
        call = self.rules.rule(call)
        return f"{call} ({between} {call})*" if self.parallel else call

    def each(self, write: Callable[[str, Mapping[str, Any]], str], names: re.Pattern[str]) -> str:
        """Write a call of any tool. Raises `RequestError` for names that the format cannot write."""
        if wrong := [name for name in self.tools if not names.fullmatch(name)]:
            raise RequestError(
                "the model's format of calls cannot write the name of this tool",
                got=shown(wrong[0]),
                fix='give it a name of letters, digits and underscores, or leave the call to the model (tool_choice="auto")',
            )
        return self.rules.rule(one_of(self.rules.rule(write(*tool)) for tool in self.tools.items()))

    def arguments(self, name: str, schema: Mapping[str, Any]) -> str:
        return self.rules.json(arguments_schema(name, schema))

    def objects(self, key: str) -> str:
        """Write a call as a JSON object with its arguments under `key`."""

        def write(name: str, schema: Mapping[str, Any]) -> str:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
            return f"{quoted(head)} {self.arguments(name, schema)} {quoted('}')}"

        return self.each(write, JSON_NAME)


@final
@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How one family writes its calls."""

    read: Callable[[Source], Steps[None]]
    # writes an expression of Lark for a turn that has to call, with the rules of a `CallGrammar`
    grammar: Callable[[CallGrammar], str]
    # whether a chat template, its quotes unescaped, asks its model for this format
    detect: Callable[[str], bool]
    tags: tuple[str, ...]  # markup around calls; never content
    turn_ends: tuple[str, ...]  # texts of the tokens that may end a turn with calls; never content
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"
    ids: str = ".+"  # regular expression of the ids that the family's template takes
    openings: tuple[str, ...] = ()  # texts that a call without tags may begin with, if the tools are known
    tools: ToolSchemas | None = None  # offered ones, with JSON schemas of their arguments; None: unknown
    frames_text: bool = False  # text stands in markup too, so turns without tools are read as well
    # writes calls of an earlier turn, as names and arguments, for templates that leave them out
    write: Callable[[Sequence[tuple[str, Any]]], str] | None = None

    def parser(
        self,
        # makes ids for calls without an id, or with that of an earlier call; None: the format's own
        new_id: Callable[[], str] | None = None,
        *,
        used: set[str] | None = None,  # ids of earlier calls; the turn's are added
        only_calls: bool = False,
        first_only: bool = False,  # calls after the first are read and dropped
    ) -> CallParser:
        """Make a parser for one turn."""
        marks = Marks(self.tags + self.turn_ends, self.openings if self.tools else ())
        arguments = (self.read, marks, new_id or self.new_id, self.ids, self.tools, used)
        return Source(*arguments, only_calls=only_calls, first_only=first_only)

    def calls_grammar(self, token_of: TokenOf, template: str, parallel: bool) -> str:
        """Write the grammar, in llguidance's variant of Lark, of a turn that calls some of `tools`, at least one.

        Raises `RequestError` if the format cannot write a tool's name, or an argument as its schema requires.

        Args:
            token_of: returns the token of a tag; None: the tag is written as text.
            template: the chat template's source, which shows the form that a family uses.
        """
        assert self.tools
        calls = CallGrammar(Rules(), self.tools, token_of, template, parallel)
        return calls.rules.text(rf"/\n{{0,2}}/ {self.grammar(calls)}")
