"""Reads the events of one chat: the pieces that a client sees while it streams, and the messages at its end."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

from jinfercept.chat.futures import unread_calls
from jinfercept.chat.messages import Message, call_message
from jinfercept.chat.turns import ChatTurns, TurnParsers
from jinfercept.engine.text_stream import TextStream
from jinfercept.events import Arguments, CallEnded, CallStarted, Event, Finished, Intercepted, Resumed, Token
from jinfercept.parsers.pieces import CallParser, Content, Piece, Reasoning
from jinfercept.request import Call, CompletionOutput, RequestOutput, SamplingParams


class _TurnReader:
    """Reads one turn: its tokens become text, and the text becomes pieces."""

    def __init__(self, turns: ChatTurns, parser: CallParser, params: SamplingParams, num_before: int = 0) -> None:
        """Args: num_before: number of tokens that the model generated in earlier turns."""
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
    """Reads one chat's events: inserts the pieces of its turns, and adds the messages to its output.

    `Token.text` and `CompletionOutput.text` stay as the model wrote them, markup included; `Content` is the visible text.
    """

    def __init__(self, turns: ChatTurns, params: SamplingParams) -> None:
        self._turns, self._params = turns, params
        self._parsers = TurnParsers(turns)
        self._turn = _TurnReader(turns, self._parsers.parser(), params)

    def read(self, event: Event) -> Iterator[Event | Piece]:
        """An event of the request with the pieces that it completes, in order."""
        match event:
            case Token():
                yield event
                yield from _of(event, self._turn.feed(event.token_id))
            case Intercepted():
                yield from _of(event, self._turn.finish())
                yield event
            case Resumed():
                self._turn = _TurnReader(self._turns, self._parsers.parser(), self._params, self._turn.num_generated)
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
        parsers, start, num_before = TurnParsers(self._turns), 0, 0
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
        pending = [*calls, *_begun(pieces)] if reason not in ("abort", "error") else []  # no results will follow
        messages.append(_answer(pieces, pending))
        unread = unread_calls(completion.interceptions)
        return replace(completion, finish_reason=reason, stop_reason=stop, messages=tuple(messages), cancelled=unread)

    def _parsed(self, parsers: TurnParsers, token_ids: Sequence[int], num_before: int, cut: bool) -> list[Piece]:
        turn = _TurnReader(self._turns, parsers.parser(), self._params, num_before)
        return [piece for token in token_ids for piece in turn.feed(token)] + turn.finish(cut)


def _of(event: Event, pieces: Iterable[Piece]) -> Iterator[Piece]:
    return (replace(piece, request_id=event.request_id) for piece in pieces)


def _calls(pieces: Iterable[Piece]) -> list[Call]:
    return [piece.call for piece in pieces if isinstance(piece, CallEnded)]


def _begun(pieces: Sequence[Piece]) -> list[Call]:
    """The call within which the turn ended, if any; its arguments are incomplete."""
    ended = len(_calls(pieces))
    texts = [piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == ended]
    begun = (piece for piece in pieces if isinstance(piece, CallStarted) and piece.index == ended)
    return [Call(piece.name, "".join(texts), id=piece.id) for piece in begun]


def _answer(pieces: Sequence[Piece], calls: Sequence[Call]) -> Message:
    """A turn as a message; its reasoning is `reasoning_content`, which chat templates read."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call_message(call) for call in calls]
    return message


def _is_cut(completion: CompletionOutput) -> bool:
    """Whether the output ended before its last turn did."""
    return completion.finish_reason != "stop" or completion.stop_reason is not None


def _is_paused(completion: CompletionOutput) -> bool:
    """Whether the output ended while its calls ran."""
    return bool(completion.interceptions) and not completion.interceptions[-1].results
