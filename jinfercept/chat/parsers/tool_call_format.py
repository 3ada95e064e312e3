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
    """How one family writes its calls.

    Attributes:
        grammar: writes the grammar of a turn that has to call, an expression of Lark, with the rules of a `CallGrammar`.
        detect: whether a chat template, its quotes unescaped, asks its model for this format.
        tags: markup around calls; never content.
        turn_ends: the texts of the tokens that may end a turn with calls; never content.
        new_id: makes an id for a call, in the form that the family's template takes.
        ids: regular expression of the ids of calls that its template takes.
        openings: texts that a call without tags may begin with, where the tools are known.
        tools: JSON schemas of the arguments of the tools that are offered, by name; None if unknown.
        frames_text: text stands in markup too, so that turns without tools are read as well.
        write: writes calls of an earlier turn, each a name and its arguments; for templates that leave them out.
    """

    read: Callable[[Source], Steps[None]]
    grammar: Callable[[CallGrammar], str]
    detect: Callable[[str], bool]
    tags: tuple[str, ...]
    turn_ends: tuple[str, ...]
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"
    ids: str = ".+"
    openings: tuple[str, ...] = ()
    tools: ToolSchemas | None = None
    frames_text: bool = False
    write: Callable[[Sequence[tuple[str, Any]]], str] | None = None

    def parser(
        self,
        new_id: Callable[[], str] | None = None,
        *,
        used: set[str] | None = None,
        only_calls: bool = False,
        first_only: bool = False,
    ) -> CallParser:
        """A parser for one turn.

        Args:
            new_id: makes ids for calls that the model gave none, or one that an earlier call has; the format's own by
                default.
            used: ids of earlier calls; those of the turn are added.
            only_calls: the turn is calls and nothing else.
            first_only: calls after the first are read and dropped.
        """
        marks = Marks(self.tags + self.turn_ends, self.openings if self.tools else ())
        arguments = (self.read, marks, new_id or self.new_id, self.ids, self.tools, used)
        return Source(*arguments, only_calls=only_calls, first_only=first_only)

    def calls_grammar(self, token_of: TokenOf, template: str, parallel: bool) -> str:
        """A grammar, in llguidance's variant of Lark, of a turn that calls some of `tools`, of which there is at least one.

        Args:
            token_of: the token that a tag is; None if it is written as text.
            template: the chat template's source: shows which of its forms a family has.
            parallel: several calls may be made; otherwise it is one.

        Raises:
            RequestError: the format cannot write a tool's name, or an argument as its schema requires.
        """
        assert self.tools
        calls = CallGrammar(Rules(), self.tools, token_of, template, parallel)
        return calls.rules.text(rf"/\n{{0,2}}/ {self.grammar(calls)}")
