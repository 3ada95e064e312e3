"""The events of a request, as frozen values in the order in which they happen. Imports nothing heavy.

In a chat, a parser makes `Piece`s of the text: content, reasoning, and calls as they are written. They follow the `Token`
with which they are certain. `request_id` names the request that an event belongs to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.calls import Call, Result
from jinfercept.errors import picklable
from jinfercept.outputs import Interrupt, Logprob, RequestOutput
from jinfercept.values import short_repr


class Token(NamedTuple):
    """The model generated a token."""

    request_id: str
    token_id: int
    #: The text that is certain with it; it can lag behind the token, and is "" without a tokenizer.
    text: str
    #: Those of this token and of the likeliest ones, if the request asks for them.
    logprobs: Mapping[int, Logprob] | None = None


@dataclass(frozen=True, slots=True)
class Intercepted:
    """The request has called out and is paused."""

    request_id: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """All calls have returned."""

    request_id: str
    #: One for each call, in order.
    results: tuple[Result, ...]
    #: The tokens that were appended to the request.
    token_ids: tuple[int, ...]
    #: Their text, as far as it is certain.
    text: str
    #: After a trap, all results of asynchronous calls that were appended, those of the trap among them.
    interrupts: tuple[Interrupt, ...] = ()
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Called:
    """The request has written an asynchronous call, and goes on."""

    request_id: str
    call: Call


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Results of asynchronous calls were appended to a request that goes on.

    Results that a trap waits for are in `Resumed`. `token_ids` and `text` are as there.
    """

    request_id: str
    interrupts: tuple[Interrupt, ...]
    token_ids: tuple[int, ...]
    text: str
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over."""

    request_id: str
    output: RequestOutput
    #: The rest of the text, which was held back until now.
    text: str
    #: The exception of the engine's step that lost the request; None if the request ended by itself.
    failure: BaseException | None = None

    def __getstate__(self) -> list[object]:
        return [self.request_id, self.output, self.text, picklable(self.failure)]


@dataclass(frozen=True, slots=True)
class Content:
    """Text for a person; never markup, never half a tag."""

    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's thoughts before it answers; never markup, and no part of its content."""

    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun: it cannot turn out to be text any more."""

    #: Place among the calls of one turn, from 0.
    index: int
    name: str
    #: In the form that the family's chat template takes.
    id: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments. All pieces, joined, are the `arguments` of the `Call`."""

    index: int
    text: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete. Its `span` counts characters of the parsed text; its arguments are JSON, unless the model erred."""

    index: int
    call: Call
    request_id: str = ""


Piece = Content | Reasoning | CallStarted | Arguments | CallEnded
Event = Token | Piece | Called | Interrupted | Intercepted | Resumed | Finished
