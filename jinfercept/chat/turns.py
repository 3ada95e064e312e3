"""The turns of one chat, read: what is a call while the engine runs, and what a client sees of text, reasoning and calls.

Both read the same tokens in the same way, down to the ids of calls. Knows no engine.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, final

from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.template import Message, call_message
from jinfercept.engine.text_stream import TextStream
from jinfercept.events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Finished,
    Intercepted,
    Piece,
    Reasoning,
    Resumed,
    Token,
)
from jinfercept.intercept.format_detector import FormatDetector
from jinfercept.parsers.pieces import CallParser, FirstCall
from jinfercept.parsers.reasoning import Beginning, PlainParser, ReasoningFormat, ReasoningParser
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.request import Call, CompletionOutput, RequestOutput, SamplingParams, Watch
from jinfercept.tokenizer.tokenizer import Tokenizer


@final
@dataclass(frozen=True, slots=True)
class ChatTurns:
    """How one chat's turns are read. A `Detector`.

    Attributes:
        form: how calls are written; None if there are no tools.
        thinking: how reasoning is marked; None if it is content.
        beginnings: where the first turn and where a later one begins.
        seed: from which the ids of calls come.
        ends: tokens that end a turn.
        hidden: special tokens that are no markup of calls or reasoning: neither content nor part of a call.
        tools: what was declared.
        max_rounds: turns whose calls are run.
        parallel: whether a turn has several calls, or the first of them only.
    """

    tokenizer: Tokenizer
    form: ToolCallFormat | None
    thinking: ReasoningFormat | None
    beginnings: tuple[Beginning, Beginning]
    seed: str
    ends: tuple[int, ...]
    hidden: frozenset[int]
    tools: Sequence[ChatTool]
    max_rounds: int
    parallel: bool = True

    def watch(self) -> Watch:
        return _TurnWatch(FormatDetector(_TurnParsers(self), self.ends).watch(), self)

    def for_the_caller(self, calls: Iterable[Call]) -> bool:
        """Whether the caller has to run one of these calls. Where it runs all tools, it answers for those too that are none."""
        names = {tool.name for tool in self.tools if tool.tool is None}
        runs_all = len(names) == len(self.tools)
        return any(runs_all or call.name in names for call in calls)


class _TurnParsers:
    """Makes the parsers of the turns, in order; ids of calls are counted from the first again."""

    def __init__(self, turns: ChatTurns) -> None:
        self._turns, self._num_turns, self._numbers = turns, 0, count()

    def parser(self) -> CallParser:
        turns, later = self._turns, self._num_turns > 0
        self._num_turns += 1
        answer = PlainParser() if turns.form is None else turns.form.parser(self._new_id)
        answer = answer if turns.parallel else FirstCall(answer)
        return answer if turns.thinking is None else ReasoningParser(turns.thinking, turns.beginnings[later], answer)

    def _new_id(self) -> str:
        """One in the format's form, the same for the engine and for the client."""
        assert self._turns.form is not None
        shape = self._turns.form.new_id()
        prefix = shape[: shape.rfind("_") + 1]
        digest = hashlib.sha256(f"{self._turns.seed}/{next(self._numbers)}".encode()).hexdigest()
        return prefix + digest[: len(shape) - len(prefix)]


class _TurnWatch:
    """Hands on the calls of a turn, unless it is one too many."""

    def __init__(self, watch: Watch, turns: ChatTurns) -> None:
        self._watch, self._turns, self._rounds = watch, turns, 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        turns = self._turns
        calls = self._watch.feed(index, token_id, "" if token_id in turns.hidden else text)
        if not calls or self._rounds == turns.max_rounds:
            return ()
        if turns.for_the_caller(calls):
            return tuple(replace(call, by_caller=turns.for_the_caller([call])) for call in calls)
        self._rounds += 1
        return calls


class _Turn:
    """One turn's text on its way to a person."""

    def __init__(self, turns: ChatTurns, parser: CallParser, params: SamplingParams, num_before: int = 0) -> None:
        """Args: num_before: tokens that the model generated in the turns before."""
        self._turns, self._parser = turns, parser
        self.num_generated = num_before
        self._hidden = turns.hidden if params.skip_special_tokens else frozenset()
        stop = tuple(params.stop or ())
        early = params.min_tokens - num_before
        self._text = TextStream(turns.tokenizer, stop, params.include_stop_str_in_output, False, early)

    def feed(self, token_id: int) -> list[Piece]:
        self.num_generated += 1
        if token_id in self._turns.ends or token_id in self._hidden or self._text.stopped is not None:
            self._text.skip()
            return []
        return self._parser.feed(self._text.add(token_id))

    def finish(self, cut: bool = False) -> list[Piece]:
        return self._parser.feed(self._text.finish()) + self._parser.finish(cut)


@final
class ChatReader:
    """Reads one chat's events: puts the pieces of its turns among them, and the messages into its output.

    `Token.text` and `CompletionOutput.text` stay as the model wrote them, markup included; what a person sees is `Content`.
    """

    def __init__(self, turns: ChatTurns, params: SamplingParams) -> None:
        self._turns, self._params = turns, params
        self._parsers = _TurnParsers(turns)
        self._turn = _Turn(turns, self._parsers.parser(), params)

    def read(self, event: Event) -> Iterator[Event | Piece]:
        match event:
            case Token():
                yield event
                yield from _of(event, self._turn.feed(event.token_id))
            case Intercepted():
                yield from _of(event, self._turn.finish())
                yield event
            case Resumed():
                self._turn = _Turn(self._turns, self._parsers.parser(), self._params, self._turn.num_generated)
                yield event
            case Finished():
                [completion] = event.output.outputs
                if not _is_paused(completion):
                    yield from _of(event, self._turn.finish(_is_cut(completion)))
                yield replace(event, output=self.with_messages(event.output))

    def with_messages(self, output: RequestOutput) -> RequestOutput:
        """The output with its messages, and with the finish reason of a chat."""
        return replace(output, outputs=[self._completed(completion) for completion in output.outputs])

    def _completed(self, completion: CompletionOutput) -> CompletionOutput:
        messages: list[Message] = []
        parsers, start, num_before = _TurnParsers(self._turns), 0, 0
        for pause in completion.interceptions:
            if not pause.results:
                break
            generated = completion.token_ids[start : pause.span[0]]
            pieces = self._parsed(parsers, generated, num_before, cut=False)
            num_before += len(generated)
            messages.append(_answer(pieces, _calls(pieces)))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                for call, result in zip(pause.calls, pause.results, strict=True)
            ]
            start = pause.span[1]
        pieces = self._parsed(parsers, completion.token_ids[start:], num_before, _is_cut(completion))
        calls = _calls(pieces)
        reason, stop = completion.finish_reason, completion.stop_reason
        if reason == "stop" and calls:
            reason, stop = "tool_calls", None if self._turns.for_the_caller(calls) else "max_rounds"
        told = [*calls, *_begun(pieces)] if reason not in ("abort", "error") else []  # nobody will bring their results
        messages.append(_answer(pieces, told))
        return replace(completion, finish_reason=reason, stop_reason=stop, messages=tuple(messages))

    def _parsed(self, parsers: _TurnParsers, token_ids: Sequence[int], num_before: int, cut: bool) -> list[Piece]:
        turn = _Turn(self._turns, parsers.parser(), self._params, num_before)
        return [piece for token in token_ids for piece in turn.feed(token)] + turn.finish(cut)


def _of(event: Event, pieces: Iterable[Piece]) -> Iterator[Piece]:
    return (replace(piece, request_id=event.request_id) for piece in pieces)


def _calls(pieces: Iterable[Piece]) -> list[Call]:
    return [piece.call for piece in pieces if isinstance(piece, CallEnded)]


def _begun(pieces: Sequence[Piece]) -> list[Call]:
    """The call, if there is one, that the turn ended within; its arguments are as far as they came."""
    ended = len(_calls(pieces))
    texts = [piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == ended]
    begun = (piece for piece in pieces if isinstance(piece, CallStarted) and piece.index == ended)
    return [Call(piece.name, "".join(texts), id=piece.id) for piece in begun]


def _answer(pieces: Sequence[Piece], calls: Sequence[Call]) -> Message:
    """A turn as a message. Its reasoning has the name that chat templates read it by."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call_message(call) for call in calls]
    return message


def _is_cut(completion: CompletionOutput) -> bool:
    """Whether it did not end with its last turn."""
    return completion.finish_reason != "stop" or completion.stop_reason is not None


def _is_paused(completion: CompletionOutput) -> bool:
    """Whether it ended while its calls ran."""
    return bool(completion.interceptions) and not completion.interceptions[-1].results
