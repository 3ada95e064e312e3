"""The transcript of one chat while it is generated: its text, its pieces, its calls and its messages.

Each token is decoded once and each character parsed once. Every client's view of the chat is made of these pieces.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, final

from jinfercept.calls import Call, Result
from jinfercept.chat.detector import ParsedTurn
from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.futures import Futures, UnreadFutures, unread_calls
from jinfercept.chat.messages import Message, call_message
from jinfercept.chat.parsers.reasoning import Beginning, PlainParser, ReasoningFormat, ReasoningParser, TrailingCalls
from jinfercept.chat.parsers.source import CallParser
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat
from jinfercept.chat.text_stream import TextStream
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece, Reasoning
from jinfercept.outputs import CompletionOutput
from jinfercept.request import Request

Note = Callable[[str, Sequence[int], Sequence[Message]], None]
"""Takes what a chat has written whose last turn has ended: its tenant, the tokens, the messages that they are."""


@final
@dataclass(frozen=True, slots=True)
class ChatTurns:
    """How one chat's turns are parsed."""

    tokenizer: Tokenizer
    form: ToolCallFormat | None  # of calls, or of text in markup; None: there is neither
    reasoning: ReasoningFormat | None  # None: reasoning is content
    beginnings: tuple[Beginning, Beginning]  # of the first turn, and of later ones
    ends: tuple[int, ...]  # tokens that end a turn
    # special tokens that mark calls or reasoning; all other special tokens are neither content nor part of a call
    markup: frozenset[int]
    tools: Sequence[ChatTool]
    max_rounds: int  # limit of turns whose calls are run
    must_call: bool = False  # the first turn has to call
    parallel: bool = True  # otherwise all calls of a turn but the first are dropped
    futures: Futures | None = None  # None: no tool has asynchronous calls
    used_ids: frozenset[str] = frozenset()  # ids of the conversation's calls so far

    def parser(self, beginning: Beginning, used_ids: set[str], only_calls: bool = False) -> CallParser:
        """Make a parser for one turn. The ids of its calls are added to `used_ids`, which has those of earlier calls."""
        answer, calls, form = PlainParser(), None, self.form
        if form is not None:
            parser = partial(form.parser, first_only=not self.parallel)
            answer = parser(used=used_ids, only_calls=only_calls)
            # a copy for each: calls that are only thought of use no ids
            calls = partial(TrailingCalls, form.tags, lambda: parser(used={*used_ids}), form.tools)
        return answer if self.reasoning is None else ReasoningParser(self.reasoning, beginning, answer, calls)

    def for_the_caller(self, calls: Iterable[Call]) -> bool:
        """Whether the caller has to run one of these calls. If it runs all tools, calls of undeclared tools are its own too."""
        names = {tool.name for tool in self.tools if tool.tool is None}
        runs_all = len(names) == len(self.tools)
        return any(runs_all or call.name in names for call in calls)


@final
class ChatTranscript:
    """A `Transcript`, fed by the engine with one request's tokens. For one thread at a time."""

    def __init__(self, turns: ChatTurns, request: Request, note: Note | None = None) -> None:
        params = request.params
        # a note is taken at the end, if a follow-up may continue the chat
        self._turns, self._request, self._note = turns, request, note
        self._ends = frozenset(turns.ends)
        self.finds_calls = turns.form is not None  # the chat has a format of calls
        self.text = TextStream(  # as the model writes it, markup included
            turns.tokenizer,
            tuple(params.stop or ()),
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
            markup=turns.markup,
            turn_ends=self._ends,
            in_call=(lambda before, text: self._parsed.in_call(before, text)) if self.finds_calls else None,
        )
        self._used_ids = set(turns.used_ids)
        self._parsed = ParsedTurn(turns.parser(turns.beginnings[0], self._used_ids, turns.must_call))
        self._message = _TurnMessage()
        self._messages: list[Message] = []
        self._pieces: list[tuple[Piece, ...]] = []  # of the turns before
        self._rounds = 0
        self._num_unread, self._num_reasoning = 0, 0  # tokens since the last piece, and those of reasoning
        self._unread = UnreadFutures(turns.futures) if turns.futures is not None else None

    def read(self, index: int, token_id: int, text: str) -> tuple[list[Piece], tuple[Call, ...]]:
        """Read the next generated token, for which `text.add` returned `text`. Returns the pieces that it completes, and calls.

        The request pauses for these calls, or ends if one is `by_caller`. They are the calls of a turn, at the token that ends
        it, and earlier ones whose results follow the turn. `index` is the token's place in the request's `token_ids`.
        """
        self._num_unread += 1
        if token_id not in self._ends:
            return self._noted(self._parsed.feed(index, self.text.num_taken, text)), ()
        pieces = self._noted(self._parsed.finish(text))
        calls = self._calls()
        self._parsed = ParsedTurn(
            self._turns.parser("answering", self._used_ids)
        )  # of a text that goes on: it ignores its end
        return pieces, calls

    def resumed(self, calls: Sequence[Call], results: Sequence[Result]) -> None:
        """Begin the next turn, after the results of calls."""
        self._messages.append(self._message.closed(self._message.calls))
        self._pieces.append(self._message.joined())
        self._messages += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        self._parsed = ParsedTurn(self._turns.parser(self._turns.beginnings[1], self._used_ids))
        self._message = _TurnMessage()

    def end(self, text: str, cut: bool) -> list[Piece]:
        """End the chat with the rest of its text, and return the last pieces. `cut`: the request ends before its turn does."""
        return self._noted(self._parsed.finish(text, cut))

    def completed(self, completion: CompletionOutput) -> CompletionOutput:
        """Return the output of the finished request with its messages, and with the finish reason of a chat."""
        calls, reason, stop = self._message.calls, completion.finish_reason, completion.stop_reason
        if reason == "stop" and calls:
            reason, stop = "tool_calls", None if self._turns.for_the_caller(calls) else "max_rounds"
        pending = self._message.all_calls if reason not in ("abort", "error") else ()  # else no results will follow
        unread = unread_calls(completion.interceptions) if self._unread is not None else ()
        messages = (*self._messages, self._message.closed(pending))
        if self._note is not None and self._can_continue(completion):
            self._note(self._request.tenant, completion.token_ids, messages)
        return replace(
            completion,
            finish_reason=reason,
            stop_reason=stop,
            messages=messages,
            cancelled=unread,
            pieces=(*self._pieces, self._message.joined()),
            num_reasoning=self._num_reasoning,
        )

    def _can_continue(self, completion: CompletionOutput) -> bool:
        # a follow-up continues the tokens only if the turn has ended and all of it is in the messages
        follow_up, params, turns = self._request.follow_up, self._request.params, self._turns
        if follow_up is None or follow_up.last or params.ignore_eos or not completion.token_ids:
            return False
        whole = turns.parallel or not self._message.calls  # further calls were dropped
        return whole and completion.finish_reason == "stop" and completion.token_ids[-1] in self._ends

    def _calls(self) -> tuple[Call, ...]:
        turns, calls = self._turns, self._parsed.spanning_tokens()
        if not self.finds_calls or self._rounds == turns.max_rounds or not (calls or self._unread):
            return ()
        if turns.for_the_caller(calls):
            return tuple(replace(call, by_caller=turns.for_the_caller([call])) for call in calls)
        if self._unread is not None:
            calls = self._unread.take(calls)
        self._rounds += bool(calls)
        return calls

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self._num_reasoning += self._num_unread if isinstance(piece, Reasoning) else 0
            self._num_unread = 0
            if isinstance(piece, CallStarted):
                self._used_ids.add(piece.id)
            self._message.add(piece)
        return [replace(piece, request_id=self._request.id) for piece in pieces]


@final
class _TurnMessage:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._texts_and_calls: list[Content | Reasoning | CallEnded] = []
        self._begun: CallStarted | None = None
        self._arguments: list[str] = []

    def add(self, piece: Piece) -> None:
        match piece:
            case CallStarted():
                self._begun, self._arguments = piece, []
            case Arguments():
                self._arguments.append(piece.text)
            case CallEnded():
                self.calls.append(piece.call)
                self._begun = None
        if isinstance(piece, Content | Reasoning | CallEnded):
            self._texts_and_calls.append(piece)

    def joined(self) -> tuple[Content | Reasoning | CallEnded, ...]:
        pieces: list[Content | Reasoning | CallEnded] = []
        for kind, group in groupby(self._texts_and_calls, type):
            own: list[Any] = [*group]
            pieces += own if kind is CallEnded else [kind("".join([piece.text for piece in own]))]
        if self._begun is not None:
            pieces.append(CallEnded(len(self.calls), self.all_calls[-1]))
        return tuple(pieces)

    @property
    def all_calls(self) -> list[Call]:
        """The complete calls, and the call within which the turn was cut off, with incomplete arguments."""
        if self._begun is None:
            return self.calls
        return [*self.calls, Call(self._begun.name, "".join(self._arguments), id=self._begun.id)]

    def closed(self, calls: Sequence[Call]) -> Message:
        content = "".join([piece.text for piece in self._texts_and_calls if isinstance(piece, Content)])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thought := "".join([piece.text for piece in self._texts_and_calls if isinstance(piece, Reasoning)]):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [call_message(call) for call in calls]
        return message
