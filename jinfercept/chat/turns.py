"""`ChatTurns`: how the turns of one chat are parsed. `transcript.ChatTranscript` parses them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, final

from jinfercept.calls import Call
from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.futures import Futures
from jinfercept.parsers.pieces import CallParser
from jinfercept.parsers.reasoning import Beginning, PlainParser, ReasoningFormat, ReasoningParser
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.trailing_calls import TrailingCalls
from jinfercept.tokenizer.tokenizer import Tokenizer


@final
@dataclass(frozen=True, slots=True)
class ChatTurns:
    """How one chat's turns are parsed.

    Attributes:
        form: the format of calls, or of text that stands in markup; None if there is neither.
        reasoning: the format of reasoning; None if reasoning is content.
        beginnings: where the first turn begins, and where later ones do.
        ends: tokens that end a turn.
        markup: special tokens that mark calls or reasoning; all others are neither content nor part of a call.
        max_rounds: limit of turns whose calls are run.
        must_call: whether the first turn has to call.
        parallel: whether a turn may have several calls; otherwise all but its first call are dropped.
        futures: of the tools with asynchronous calls; None if there are none.
        used_ids: ids of the calls of the conversation so far.
    """

    tokenizer: Tokenizer
    form: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    beginnings: tuple[Beginning, Beginning]
    ends: tuple[int, ...]
    markup: frozenset[int]
    tools: Sequence[ChatTool]
    max_rounds: int
    must_call: bool = False
    parallel: bool = True
    futures: Futures | None = None
    used_ids: frozenset[str] = frozenset()

    def parser(self, beginning: Beginning, used_ids: set[str], only_calls: bool = False) -> CallParser:
        """A parser for one turn.

        Args:
            beginning: where the turn begins.
            used_ids: ids of earlier calls; those of the turn are added.
        """
        answer, calls, form = PlainParser(), None, self.form
        if form is not None:
            parser = partial(form.parser, first_only=not self.parallel)
            answer = parser(used=used_ids, only_calls=only_calls)
            # a copy for each: calls that are only thought of use no ids
            calls = TrailingCalls(form.tags, lambda: parser(used={*used_ids}), form.tools)
        return answer if self.reasoning is None else ReasoningParser(self.reasoning, beginning, answer, calls)

    def of_chat(self, first: Beginning, used_ids: frozenset[str]) -> Self:
        """The same for one conversation.

        Args:
            first: where its first turn begins.
            used_ids: ids of its calls so far.
        """
        return replace(self, beginnings=(first, self.beginnings[1]), used_ids=used_ids)

    def for_the_caller(self, calls: Iterable[Call]) -> bool:
        """Whether the caller has to run one of these calls. If it runs all tools, calls of undeclared tools are its own too."""
        names = {tool.name for tool in self.tools if tool.tool is None}
        runs_all = len(names) == len(self.tools)
        return any(runs_all or call.name in names for call in calls)
