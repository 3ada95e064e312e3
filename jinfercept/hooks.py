"""Interfaces of the objects that a request brings along, and that the engine calls while the request runs.

A `Detector` finds calls, a `Renderer` writes their results, a `Grammar` allows tokens, a `CallMarkup` reads and answers
asynchronous calls, a `Transcript` reads a chat.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, final

from jinfercept.calls import Call, CallMode, Result
from jinfercept.events import Piece
from jinfercept.outputs import CompletionOutput


class Watch(Protocol):
    """Looks for calls in one request's generated tokens, without those that tools return."""

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        """The calls that the next generated token completes; usually none.

        The request pauses until all of them have returned, unless one is `by_caller`.

        Args:
            index: place of the token in the request's `token_ids`.
            text: the text that has become certain with it; "" without a tokenizer.
        """
        ...


class Detector(Protocol):
    """Finds calls."""

    def watch(self) -> Watch:
        """A watch for one request, of which nothing is generated."""
        ...


class Renderer(Protocol):
    """Writes the text that a request reads after a pause."""

    def render(
        self, calls: tuple[Call, ...], results: tuple[Result, ...], room: int
    ) -> tuple[list[int], tuple[Result, ...]]:
        """At most `room` tokens that have all results of one pause, and the results as they are in them."""
        ...


class Constraint(Protocol):
    """The state of a grammar after the generated text of one request, to which tokens of tools do not belong."""

    #: Nothing but the end can follow.
    ended: bool

    def allowed(self) -> Any:
        """The tokens that may come next, end tokens among them: bit `v % 32` of word `v // 32` of an array of uint32."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the next generated token."""
        ...


class Grammar(Protocol):
    """A grammar of texts."""

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        """The constraint of an empty text, which may end with one of these tokens; None if every text is allowed."""
        ...


@final
class SharedLimit:
    """Limits the pending calls of several requests together, of which there are `number`. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.number, self._most, self._lock = 0, most, threading.Lock()

    def take(self) -> bool:
        """Count one more call; False, and nothing is counted, if there are too many."""
        with self._lock:
            is_free = self.number < self._most
            self.number += is_free
        return is_free

    def release(self, number: int = 1) -> None:
        with self._lock:
            self.number -= number


class TrapFrame(NamedTuple):
    """A complete trap, and the range of its characters."""

    span: tuple[int, int]


class BadFrame(NamedTuple):
    """Markup that calls nothing: the id if there is one, the problem, and the range of its characters."""

    id: str
    problem: str
    span: tuple[int, int]


class MarkupWatch(Protocol):
    """Finds the asynchronous calls and the traps of one request in the generated tokens."""

    @property
    def clean(self) -> bool:
        """Whether an interrupt may follow the last token."""
        ...

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call | TrapFrame | BadFrame, ...]:
        """The calls, traps and mistakes that are complete with the next generated token, in order; see `Watch`."""
        ...

    def end(self) -> tuple[BadFrame, ...]:
        """The call that is begun and incomplete at the end of a text, if there is one. Another text may follow."""
        ...


class CallMarkup(Protocol):
    """How requests write asynchronous calls and read their results; see `chat.call_markup`."""

    #: For calls that are pending at an end of text.
    on_end: Literal["wait", "cancel"]
    #: Limit of one request's pending calls.
    max_pending: int
    #: Limit of the pending calls of several requests together; None: no such limit.
    shared_limit: SharedLimit | None

    def watch(self, prompt: str | None, prompt_token_ids: Sequence[int]) -> MarkupWatch:
        """A watch for one request of which nothing is generated. `prompt` is None if only the tokens are known."""
        ...

    def kept(self, call: Call, result: Result) -> Result:
        """The beginning of a result that an interrupt can hold, and a little more if the result is longer."""
        ...

    def mode(self, call: Call) -> CallMode:
        """When a call runs: the model waits for it, or goes on."""
        ...

    def interrupt(self, call: Call, result: Result, room: int) -> tuple[list[int], Result]:
        """The tokens, at most `room`, by which a request reads a result, and the result as it is in them."""
        ...


class Text(Protocol):
    """One request's text, fed token by token; see `chat.text_stream.TextStream`."""

    last_raw: str
    stopped: str | None
    hidden: frozenset[int]

    @property
    def text(self) -> str: ...

    @property
    def half_character(self) -> bool: ...

    def add(self, token_id: int) -> str: ...

    def inject(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...

    def token_text(self, token_id: int) -> str: ...


class Transcript(Protocol):
    """A chat while it is generated; see `chat.transcript.ChatTranscript`."""

    @property
    def text(self) -> Text: ...

    @property
    def finds_calls(self) -> bool: ...

    def read(self, index: int, token_id: int, text: str) -> tuple[Iterable[Piece], tuple[Call, ...]]: ...

    def resumed(self, calls: tuple[Call, ...], results: tuple[Result, ...]) -> None: ...

    def end(self, text: str, cut: bool) -> Iterable[Piece]: ...

    def completed(self, completion: CompletionOutput) -> CompletionOutput: ...
