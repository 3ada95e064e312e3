"""Asynchronous calls of requests: started while their request goes on, answered by interrupts.

A request with pending calls runs. Only its trap, or an end of text that waits for them, is an interception.
"""

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, NamedTuple, final

from jinfercept.calls import Call, Result
from jinfercept.engine.session import Session
from jinfercept.events import Called, Interrupted
from jinfercept.hooks import BadFrame, CallMarkup, TrapFrame
from jinfercept.outputs import Interrupt
from jinfercept.sched.sequence import CallDuration, PendingCall, State

if TYPE_CHECKING:
    from jinfercept.engine.lifecycle import RequestLifecycle

type Frame = Call | TrapFrame | BadFrame


class PendingAsyncCall(NamedTuple):
    """An asynchronous call that runs since `began_s`, in seconds of the engine's clock."""

    call: Call
    pending: PendingCall
    began_s: float


@final
class AsyncCallQueue:
    """The asynchronous calls of one request: starts them, and appends their results. Used by the engine's thread."""

    def __init__(self, session: Session, markup: CallMarkup, requests: "RequestLifecycle") -> None:
        self._session, self._markup = session, markup
        self._watch = markup.watch(session.request.prompt, session.request.prompt_token_ids)
        self._requests, self._scheduler, self._events = requests, requests.scheduler, requests.events
        self._pending: dict[str, PendingAsyncCall] = {}  # by id
        self._postponed: list[Call] = []  # they start at the next trap
        self._queue: list[tuple[Call, Result]] = []  # results that the request has not read, as they arrived
        self._wanted: set[str] | None = (
            set()
        )  # ids to wait for at the next clean place; None: all pending ones, after a trap
        self._awaited: dict[str, Result | None] = {}  # the trap's calls, each with its result once that has come

    def accept(self, token: int, now: float) -> None:
        """Start the calls that are complete with the newest token, and note traps and mistakes."""
        for frame in self._watch.feed(self._session.num_written - 1, token, self._session.last_raw):
            self._take(frame, now)

    def read_again(self, index: int, token: int) -> list[Call | BadFrame]:
        """Read a token of an aborted request again (`Session.read_again`); return the calls and mistakes that it completes."""
        self._wanted = set() if self._watch.clean else self._wanted  # a trap that waited for nothing
        frames = list[Call | BadFrame]()
        for frame in self._watch.feed(index, token, self._session.last_raw):
            if isinstance(frame, TrapFrame):
                self._wanted = None
            else:
                frames.append(frame)
        return frames

    def end_text(self) -> None:
        """Note that results follow the tokens that were read again. Calls that are not complete are forgotten."""
        self._watch.end()
        self._wanted = set()

    def begin_again(self, frames: Iterable[Frame], awaited: Set[str], now: float) -> None:
        """Make calls of an aborted request again, and wait for those whose ids it waited for."""
        for frame in frames:
            self._take(frame, now)
        for call in [call for call in self._postponed if call.id in awaited]:
            self._postponed.remove(call)
            self._start(call, now)
        if awaited:
            self._wait(awaited, now)

    def go_on(self, now: float) -> None:
        """Append queued results, or begin a trap, if the markup is clean behind the newest token."""
        if (not self._queue and self._wanted == set()) or not self._is_clean:
            return
        self._inject()
        if self._wanted is None:
            self._trap(now)
        elif self._wanted:
            self._wait(self._wanted, now)

    def wait_at_end(self, now: float) -> bool:
        """At the end of the text, wait for pending calls if the request's markup says so. Returns False if the request ends."""
        sequence = self._session.sequence
        if self._markup.on_end == "cancel" or not (self._pending or self._postponed or self._queue):
            return False
        if sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self._scheduler.max_model_len:
            return False
        for frame in self._watch.end():
            self._refuse(Call("", "", frame.span, id=frame.id), frame.problem)
        self._inject()
        self._trap(now)
        return True

    def receive(self, call: Call, result: Result) -> None:
        """Queue the result of a call; `deliver` appends it."""
        pending = self._pending.pop(call.id).pending
        end = CallDuration(result.duration_s, result.status not in ("timeout", "unknown_tool"))
        self._scheduler.end_call(self._session.sequence, pending, end)
        self._release(1)
        result = self._markup.kept(call, result)
        self._queue.append((call, result))
        if call.id in self._awaited:
            self._awaited[call.id] = result

    def deliver(self) -> None:
        """Append queued results, if the last token is known and the request waits for no other call."""
        sequence = self._session.sequence
        if sequence.state is State.INTERCEPTED:
            if self._awaited and all(result is not None for result in self._awaited.values()):
                self._resume()
        elif not sequence.pending and self._is_clean:
            self._inject()

    def cancel(self, now: float) -> None:
        """Note that the request has ended. It never reads the results of calls that are pending or queued."""
        session = self._session
        for pending in self._pending.values():
            end = CallDuration(now - pending.began_s, clean=False)
            self._scheduler.end_call(session.sequence, pending.pending, end)
        self._release(len(self._pending) + len(self._postponed))
        unread = [call for call, _ in self._queue]
        session.cancelled += [*unread, *(pending.call for pending in self._pending.values()), *self._postponed]
        session.cancelled += [Call("", "", frame.span, id=frame.id) for frame in self._watch.end()]

    def _take(self, frame: Frame, now: float) -> None:
        if isinstance(frame, TrapFrame):
            self._wanted = None
        elif isinstance(frame, BadFrame):
            self._refuse(Call("", "", frame.span, id=frame.id), frame.problem)
        elif problem := self._reached_limit():
            self._refuse(frame, problem)
        else:
            self._call(frame, now)

    def _call(self, call: Call, now: float) -> None:
        self._events.append(Called(self._session.request.id, call))
        mode = self._markup.mode(call)
        if mode == "parallel":
            self._postponed.append(call)
            return
        if mode == "sync" and self._wanted is not None:
            self._wanted.add(call.id)
        self._start(call, now)

    def _start(self, call: Call, now: float) -> None:
        request = self._session.request
        pending_call = self._session.pending(call, (request.id, "async", call.id))
        self._pending[call.id] = PendingAsyncCall(call, pending_call, now)
        self._scheduler.begin_call(pending_call, now)
        self._requests.dispatcher.start(request.id, call, request.tools, request.tenant)

    def _trap(self, now: float) -> None:
        for call in self._postponed:
            self._start(call, now)
        self._postponed.clear()
        self._wait(self._pending.keys(), now)

    def _wait(self, ids: Set[str], now: float) -> None:
        awaited = [pending for call_id, pending in self._pending.items() if call_id in ids]
        self._wanted = set()
        if not awaited:
            return
        calls = tuple(pending.call for pending in awaited)
        self._awaited = {call.id: None for call in calls}
        pending_calls = [pending.pending._replace(head_start_s=now - pending.began_s) for pending in awaited]
        self._requests.pause(self._session, calls, pending_calls, now, begun=True)

    def _resume(self) -> None:
        session, number = self._session, len(self._session.interrupts)
        results = tuple(result for result in self._awaited.values() if result is not None)
        self._awaited = {}
        began = [call.head_start_s for call in session.sequence.calls]
        lasted_s = max(result.duration_s - start_s for result, start_s in zip(results, began, strict=True))
        tokens, shown = self._read_queue()
        interrupts = tuple(session.interrupts[number:])
        self._requests.go_on(session, results, tokens, shown, max(0.0, lasted_s), interrupts=interrupts)

    def _inject(self) -> None:
        # The place of an interrupt depends only on which tokens were generated or in flight when its result was polled. It
        # follows the last of these, or the first later token behind which the markup is clean. A sample in flight that would
        # follow the interrupt is void. So neither the pipeline's depth, the policy nor the batch changes a token. All queued
        # results are appended together, first in, first out.
        if self._queue:
            session, number = self._session, len(self._session.interrupts)
            tokens, shown = self._read_queue()
            self._scheduler.inject(session.sequence, tokens)
            interrupts = tuple(session.interrupts[number:])
            self._events.append(Interrupted(session.request.id, interrupts, tuple(tokens), shown))

    def _read_queue(self) -> tuple[list[int], str]:
        # The caller appends these tokens to the sequence.
        session, tokens = self._session, list[int]()
        room = self._scheduler.max_model_len - len(session.sequence.tokens) - 1
        for call, result in self._queue:
            frame, used = self._markup.interrupt(call, result, room - len(tokens))
            start = session.num_written + len(tokens)
            tokens += frame
            session.interrupts.append(Interrupt(call, used, (start, start + len(frame))))
        self._queue.clear()
        return tokens, session.read_external(tokens)

    def _reached_limit(self) -> str:
        # Without a problem, the call is counted.
        most, shared = self._markup.max_pending, self._markup.shared_limit
        if len(self._pending) + len(self._postponed) >= most:
            return f"{most} calls are pending, wait for them first"
        if shared is None or shared.take():
            return ""
        return "too many calls of other requests are pending, call again later"

    def _release(self, number: int) -> None:
        if self._markup.shared_limit is not None:
            self._markup.shared_limit.release(number)

    def _refuse(self, call: Call, problem: str) -> None:
        self._queue.append((call, Result(f"error: {problem}", "error")))

    @property
    def _is_clean(self) -> bool:
        # clean: outside frames, reasoning, half-written marks and half characters
        text = self._session.text
        return self._watch.clean and not (text is not None and text.half_character)
