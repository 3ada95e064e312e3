"""`ChatTurns`: how the turns of one chat are parsed, and the detector that finds their calls while the engine runs.

`reader.ChatReader` parses the same tokens in the same way, down to the ids of calls. Knows no engine.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Self, final

from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.futures import Futures
from jinfercept.intercept.format_detector import FormatDetector
from jinfercept.parsers.pieces import CallParser, FirstCall
from jinfercept.parsers.reasoning import Beginning, PlainParser, ReasoningFormat, ReasoningParser
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.request import Call, Watch
from jinfercept.tokenizer.tokenizer import Tokenizer


@final
@dataclass(frozen=True, slots=True)
class ChatTurns:
    """How one chat's turns are parsed. A `Detector`.

    Attributes:
        form: the format of calls; None if there are no tools.
        reasoning: the format of reasoning; None if reasoning is content.
        beginnings: where the first turn begins, and where later ones do.
        seed: makes the ids of calls.
        ends: tokens that end a turn.
        hidden: special tokens that are no markup of calls or reasoning: neither content nor part of a call.
        tools: the declared tools.
        max_rounds: limit of turns whose calls are run.
        parallel: whether a turn may have several calls; otherwise all but its first call are dropped.
        futures: of the tools with asynchronous calls; None if there are none.
    """

    tokenizer: Tokenizer
    form: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    beginnings: tuple[Beginning, Beginning]
    seed: str
    ends: tuple[int, ...]
    hidden: frozenset[int]
    tools: Sequence[ChatTool]
    max_rounds: int
    parallel: bool = True
    futures: Futures | None = None

    def watch(self) -> Watch:
        return _TurnWatch(FormatDetector(TurnParsers(self), self.ends).watch(), self)

    def beginning(self, first: Beginning) -> Self:
        """The same with another beginning of the first turn."""
        return replace(self, beginnings=(first, self.beginnings[1]))

    def for_the_caller(self, calls: Iterable[Call]) -> bool:
        """Whether the caller has to run one of these calls. If it runs all tools, calls of undeclared tools are its own too."""
        names = {tool.name for tool in self.tools if tool.tool is None}
        runs_all = len(names) == len(self.tools)
        return any(runs_all or call.name in names for call in calls)


class TurnParsers:
    """Makes the parsers of a chat's turns, in order. Call ids depend on the seed and on the number of the call only."""

    def __init__(self, turns: ChatTurns) -> None:
        self._turns, self._num_turns, self._numbers = turns, 0, count()

    def parser(self) -> CallParser:
        """The parser of the next turn."""
        turns, later = self._turns, self._num_turns > 0
        self._num_turns += 1
        answer = PlainParser() if turns.form is None else turns.form.parser(self._new_id)
        answer = answer if turns.parallel else FirstCall(answer)
        if turns.reasoning is None:
            return answer
        return ReasoningParser(turns.reasoning, turns.beginnings[later], answer)

    def _new_id(self) -> str:
        """An id in the format's form, the same in the detector and in the reader."""
        assert self._turns.form is not None
        shape = self._turns.form.new_id()
        prefix = shape[: shape.rfind("_") + 1]
        digest = hashlib.sha256(f"{self._turns.seed}/{next(self._numbers)}".encode()).hexdigest()
        return prefix + digest[: len(shape) - len(prefix)]


class _TurnWatch:
    """Returns the calls of a turn, and earlier ones whose results follow it, unless `max_rounds` turns have been run."""

    def __init__(self, watch: Watch, turns: ChatTurns) -> None:
        self._watch, self._turns, self._rounds = watch, turns, 0
        self._unread = turns.futures.reader() if turns.futures is not None else None

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        turns = self._turns
        calls = self._watch.feed(index, token_id, "" if token_id in turns.hidden else text)
        if self._rounds == turns.max_rounds or not (calls or (self._unread and token_id in turns.ends)):
            return ()
        if turns.for_the_caller(calls):
            return tuple(replace(call, by_caller=turns.for_the_caller([call])) for call in calls)
        if self._unread is not None:
            calls = self._unread.take(calls)
        self._rounds += bool(calls)
        return calls
