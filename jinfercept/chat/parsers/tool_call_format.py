"""`ToolCallFormat`: how one model family writes its tool calls. `formats.FORMATS` has all of them."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinfercept.chat.parsers.call_grammars import CallGrammar, Rules, TokenOf
from jinfercept.chat.parsers.source import CallParser, Marks, Source, Steps, ToolSchemas


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
