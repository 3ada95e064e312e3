"""What all tools of a file have in common: a line, a time-out, arguments that are read, a result that is cut.

An endpoint is a function of the arguments; what it raises is, as a result, for the model to read.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, final

from jinfercept.chat.function_tools import ChatTool
from jinfercept.endpoints.background import BackgroundLoop
from jinfercept.endpoints.tables import Limits
from jinfercept.intercept.dispatcher import CALLER
from jinfercept.request import Tool

OWNER = ContextVar("jinfercept_owner", default="")
"""Within a tool's function: for whom it is called, where that was said (`owned`)."""

_GRACE_S = 1.0
"""An endpoint tells in its own words that it took too long; only if it does not, the dispatcher does, so much later."""


class CallFailed(Exception):
    """A call came to nothing; says why."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call, as an endpoint gets it.

    Attributes:
        arguments: as the model wrote them.
        request_id: whose call it is; "" if nobody said.
        owner: for whom it is called; "" if nobody said.
        expires_s: when it times out, in seconds of `time.monotonic`.
    """

    arguments: Mapping[str, Any]
    request_id: str
    owner: str
    expires_s: float


Endpoint = Callable[[CallRequest], Coroutine[Any, Any, str]]
"""Answers; runs on the background's loop and is cancelled when nobody waits any more."""


@dataclass(slots=True)
class _Calls:
    """One owner's calls in a line: how many run, and those that wait, first come first."""

    running: int = 0
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict[asyncio.Future[None], None])


@final
class FairSlots:
    """Slots that owners take turns at. Of one event loop.

    A slot that becomes free goes to the owner with the fewest running calls; of several, to the one whose last call began or
    ended longest ago; of its calls, to the one that came first.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._owners: dict[
            str, _Calls
        ] = {}  # with running or waiting calls; last the one whose call began or ended last

    async def begin(self, owner: str) -> None:
        """Wait for a slot and take it. A call that is cancelled while it waits takes none."""
        calls = self._owners.setdefault(owner, _Calls())
        if self._free:
            self._take(owner)
            return
        place = asyncio.get_running_loop().create_future()
        calls.waiting[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(owner, place)
            else:  # it was its turn already
                self.end(owner)
            raise

    def end(self, owner: str) -> None:
        """Give a slot of the owner's back."""
        self._free += 1
        self._count(owner, -1)
        self._next()

    def _next(self) -> None:
        """Hand a free slot on."""
        while (owner := self._whose_turn()) is not None:
            waiting = self._owners[owner].waiting
            place = next(iter(waiting))
            del waiting[place]
            if not place.cancelled():
                self._take(owner)
                place.set_result(None)
                return

    def _whose_turn(self) -> str | None:
        waiting = (owner for owner, calls in self._owners.items() if calls.waiting)
        return min(waiting, key=lambda owner: self._owners[owner].running, default=None)

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._count(owner, 1)

    def _count(self, owner: str, change: int) -> None:
        """A call of the owner's began or ended."""
        calls = self._owners.pop(owner)
        calls.running += change
        if calls.running or calls.waiting:
            self._owners[owner] = calls

    def _leave(self, owner: str, place: asyncio.Future[None]) -> None:
        if (calls := self._owners.get(owner)) is not None:
            calls.waiting.pop(place, None)
            if not calls.running and not calls.waiting:
                del self._owners[owner]


@final
class CallQueue:
    """Lets so many calls run at once; the others wait, their owners in turns.

    Args:
        most: None for any number.
        to_the_end: a call that is cancelled goes on and keeps its slot until it has ended: it runs in a thread.
    """

    def __init__(self, most: int | None, *, to_the_end: bool = False) -> None:
        self._turns = FairSlots(most) if most is not None else None
        self._to_the_end = to_the_end

    async def run[T](self, owner: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work when it is its turn."""
        if self._turns is not None:
            await self._turns.begin(owner)

        def end(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # seen, also where the call was cancelled
            if self._turns is not None:
                self._turns.end(owner)

        task = asyncio.ensure_future(work())
        task.add_done_callback(end)
        return await (asyncio.shield(task) if self._to_the_end else task)


def declare(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's declaration, OpenAI's."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def endpoint_tool(
    declaration: Mapping[str, Any],
    limits: Limits,
    endpoint: Endpoint,
    background: BackgroundLoop,
    line: CallQueue,
    late: str = "it took longer than",
) -> ChatTool:
    """A tool that an endpoint answers.

    Args:
        limits: of time and of the result; the line has its own.
        line: in which its calls wait.
        late: what to say of a time-out, before its seconds.
    """

    async def answer(arguments: str, request_id: str, owner: str, expires_s: float) -> str:
        asked, begun_s = CallRequest(_object(arguments), request_id, owner, expires_s), expires_s

        async def begin() -> str:
            nonlocal begun_s
            begun_s = time.monotonic()
            return await endpoint(asked)

        try:
            async with asyncio.timeout(expires_s - time.monotonic()):
                text = await line.run(owner, begin)
        except TimeoutError as error:
            if time.monotonic() < expires_s:
                raise
            waited_s = limits.timeout_s - (expires_s - begun_s)
            others = f", of which other calls took {waited_s:.1f}" if 2 * waited_s > limits.timeout_s else ""
            raise TimeoutError(f"{late} {limits.timeout_s:g} s{others}") from error
        return _cut(text, limits.max_result_bytes)

    def call(arguments: str) -> Coroutine[Any, Any, str]:
        request_id, owner, expires_s = CALLER.get(), OWNER.get(), time.monotonic() + limits.timeout_s
        return background.run(lambda: answer(arguments, request_id, owner, expires_s))

    name, limit = declaration["function"]["name"], limits.max_result_tokens
    return ChatTool(declaration, Tool(call, name=name, timeout_s=limits.timeout_s + _GRACE_S, max_result_tokens=limit))


def owned(tool: ChatTool, owner: str) -> ChatTool:
    """A tool that is told for whom it is called."""
    assert tool.tool is not None, "a tool that is run here"
    function = tool.tool.function

    def call(arguments: str) -> object:
        OWNER.set(owner)  # of the call's own thread
        return function(arguments)

    return replace(tool, tool=replace(tool.tool, function=call))


def _cut(text: str, max_bytes: int | None) -> str:
    """At most so many bytes of UTF-8; that something was cut stands at the end."""
    if max_bytes is None or len(data := text.encode(errors="replace")) <= max_bytes:
        return text
    note = f" ... (cut: {len(data)} bytes, {max_bytes} allowed)"
    return data[: max(0, max_bytes - len(note))].decode(errors="ignore") + note


def _object(arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"the arguments are no JSON: {error}") from error
    if not isinstance(values, dict):
        raise CallFailed("the arguments are no JSON object")
    return values
