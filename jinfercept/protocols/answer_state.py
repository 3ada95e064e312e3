"""`AnswerState`: an answer as its client sees it, folded from the events of its request.

A client has one message, though the model may write several turns, with calls of the server's tools between them.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from jinfercept.calls import Call
from jinfercept.chat.messages import call_message
from jinfercept.events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Intercepted,
    Reasoning,
    Resumed,
)
from jinfercept.outputs import CompletionOutput

Message = Mapping[str, Any]


@final
class AnswerState:
    """One answer. The texts of its turns are one text each; calls of the server's tools are left out.

    Args:
        client_tools: names of the tools that the client runs.

    Attributes:
        num_rounds: rounds of calls that the server has run.
        running: calls of the server's tools that run now.
    """

    def __init__(self, client_tools: Container[str]) -> None:
        self._client_tools = client_tools
        self._content, self._reasoning = _JoinedText(), _JoinedText()
        self._places: dict[int, int] = {}  # of the client's calls of this turn, by their index among all calls of it
        self.num_rounds = 0
        self.running: tuple[Call, ...] = ()

    def take(self, event: Event) -> Event | None:
        """The event as the client sees it, or None: with the blank line before the text of a later turn, and with the index
        among the client's calls."""
        match event:
            case Content():
                return Content(self._content.add(event.text))
            case Reasoning():
                return Reasoning(self._reasoning.add(event.text))
            case CallStarted() if event.name in self._client_tools:
                place = self._places[event.index] = len(self._places)
                return replace(event, index=place)
            case CallStarted():
                return None
            case Arguments() | CallEnded():
                place = self._places.get(event.index)
                return None if place is None else replace(event, index=place)
            case Intercepted():
                self.running = event.calls
            case Resumed():
                self.num_rounds, self.running = self.num_rounds + 1, ()
                self._places.clear()
                self._content.next_turn()
                self._reasoning.next_turn()
            case _:
                pass
        return event


def merged_message(turns: Sequence[Message], client_tools: Container[str]) -> dict[str, Any]:
    """The message that a client sees of an answer.

    Args:
        turns: messages of the assistant, and results of its calls.
        client_tools: names of the tools that the client runs; calls of other tools are left out.

    Returns:
        The texts `content` and `reasoning_content` of all turns, and `tool_calls` of the last one.
    """
    state = AnswerState(client_tools)
    content, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
    for event in _events_of(turns):
        match state.take(event):
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallEnded(call=call):
                calls.append(call_message(call))
            case Resumed():
                calls.clear()
            case _:
                pass
    return {"content": "".join(content), "reasoning_content": "".join(reasoning), "tool_calls": calls}


def _events_of(turns: Sequence[Message]) -> Iterator[Event]:
    for place, turn in enumerate([turn for turn in turns if turn["role"] == "assistant"]):
        if place:
            yield Resumed("", (), (), "")
        yield Reasoning(turn.get("reasoning_content", ""))
        yield Content(turn["content"])
        for index, call in enumerate(turn.get("tool_calls", ())):
            function = call["function"]
            yield CallStarted(index, function["name"], call["id"])
            yield CallEnded(index, Call(function["name"], function["arguments"], id=call["id"]))


def pieces_of(completion: CompletionOutput) -> Iterator[Event]:
    """The events that a stream has of a finished chat, each text and the arguments of each call in one piece, up to its end."""
    for place, pieces in enumerate(completion.pieces):
        if place:
            yield Resumed("", (), (), "")
        for piece in pieces:
            if isinstance(piece, CallEnded):
                yield CallStarted(piece.index, piece.call.name, piece.call.id)
                yield Arguments(piece.index, piece.call.arguments)
            yield piece


@final
class _JoinedText:
    """A text of several turns, with a blank line between two turns that are not separated by white space."""

    def __init__(self) -> None:
        self._last = ""
        self._is_new_turn = False

    def next_turn(self) -> None:
        """Texts that are added from now on belong to another turn."""
        self._is_new_turn = True

    def add(self, text: str) -> str:
        """A piece of text, with the blank line before it if it needs one."""
        if not text:
            return ""
        gap = self._is_new_turn and self._last and not self._last.isspace() and not text[0].isspace()
        self._last, self._is_new_turn = text[-1], False
        return f"\n\n{text}" if gap else text
