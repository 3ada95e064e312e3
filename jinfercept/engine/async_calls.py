"""Asynchronous calls of requests: started while their request goes on, answered by interrupts.

Where an interrupt stands in a request's tokens depends only on which of them were generated or in flight when its result was
polled: it follows the last of these, or the first token after it behind which the markup is clean (outside frames, reasoning,
half-written marks and half characters). A sample in flight that would follow the interrupt is void. So neither the pipeline's
depth, the policy nor the batch changes a token. Results are queued first in, first out, and all that are queued are appended
together. A request with pending calls runs; only its trap, or an end of text that waits for them, is an interception.
"""

from collections.abc import Iterable, Set
from typing import final

from jinfercept.calls import Call, Result
from jinfercept.engine.calls_in_flight import CallsInFlight, PendingAsyncCall
from jinfercept.engine.clock import Clock
from jinfercept.engine.protocols import CallDispatcher
from jinfercept.engine.session import Session
from jinfercept.events import Called, Event, Intercepted, Interrupted, Resumed
from jinfercept.hooks import BadFrame, TrapFrame
from jinfercept.outputs import Interception, Interrupt
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import CallDuration, State

type Frame = Call | TrapFrame | BadFrame


@final
class AsyncCallQueue:
    """Starts the asynchronous calls of one engine's requests, and appends their results. Used by the engine's thread.

    Args:
        scheduler: has the requests' sequences.
    """

    def __init__(self, scheduler: Scheduler, dispatcher: CallDispatcher, clock: Clock) -> None:
        self._scheduler, self._dispatcher, self._clock = scheduler, dispatcher, clock

    def accept(self, session: Session, token: int, now: float, events: list[Event]) -> None:
        """Start the calls that are complete with the newest token, and note traps and mistakes."""
        flight = session.flight
        assert flight is not None
        text = session.text.last_raw if session.text else ""
        for frame in flight.watch.feed(len(session.stream) - 1, token, text):
            self._take(session, flight, frame, now, events)

    def begin_again(
        self, session: Session, frames: Iterable[Frame], awaited: Set[str], now: float, events: list[Event]
    ) -> None:
        """Make calls of a request that was aborted again, and wait for those that it waited for then, by id."""
        flight = session.flight
        assert flight is not None
        for frame in frames:
            self._take(session, flight, frame, now, events)
        for call in [call for call in flight.postponed if call.id in awaited]:
            flight.postponed.remove(call)
            self._start(session, flight, call, now)
        if awaited:
            self._wait(session, flight, awaited & flight.pending.keys(), now, events)

    def go_on(self, session: Session, now: float, events: list[Event]) -> None:
        """Append what is queued, or begin the trap that was found, if the markup is clean behind the newest token."""
        flight = session.flight
        assert flight is not None
        if (not flight.queue and flight.wanted == set()) or not _is_clean(session, flight):
            return
        self._inject(session, flight, events)
        if flight.wanted is None:
            self._trap(session, flight, now, events)
        elif flight.wanted:
            self._wait(session, flight, flight.wanted & flight.pending.keys(), now, events)

    def wait_at_end(self, session: Session, now: float, events: list[Event]) -> bool:
        """The text has ended: wait for what is pending, if there is any and the request says so; False if it ends."""
        flight, sequence = session.flight, session.sequence
        if (
            flight is None
            or flight.markup.on_end == "cancel"
            or not (flight.pending or flight.postponed or flight.queue)
        ):
            return False
        if sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self._scheduler.max_model_len:
            return False
        for frame in flight.watch.end():
            _refuse(flight, Call("", "", frame.span, id=frame.id), frame.problem)
        self._inject(session, flight, events)
        self._trap(session, flight, now, events)
        return True

    def receive(self, session: Session, call: Call, result: Result) -> None:
        """Queue the result of a call; `deliver` appends it."""
        flight = session.flight
        assert flight is not None
        pending_call = flight.pending.pop(call.id).pending
        end = CallDuration(result.duration_s, result.status not in ("timeout", "unknown_tool"))
        self._scheduler.end_call(session.sequence, pending_call, end)
        _release(flight, 1)
        result = flight.markup.kept(call, result)
        flight.queue.append((call, result))
        if call.id in flight.awaited:
            flight.awaited[call.id] = result

    def deliver(self, session: Session, events: list[Event]) -> None:
        """Append what is queued, if the last token is known and the request waits for no other call."""
        flight, sequence = session.flight, session.sequence
        assert flight is not None
        if sequence.state is State.INTERCEPTED:
            if flight.awaited and not flight.is_trapped:
                self._resume(session, flight, events)
        elif not sequence.pending and _is_clean(session, flight):
            self._inject(session, flight, events)

    def cancel(self, session: Session, now: float) -> None:
        """The request has ended: what it has not read it never reads."""
        flight = session.flight
        if flight is None:
            return
        for pending in flight.pending.values():
            end = CallDuration(now - pending.began_s, clean=False)
            self._scheduler.end_call(session.sequence, pending.pending, end)
        _release(flight, len(flight.pending) + len(flight.postponed))
        unread = [call for call, _ in flight.queue]
        session.cancelled += [*unread, *(pending.call for pending in flight.pending.values()), *flight.postponed]
        session.cancelled += [Call("", "", frame.span, id=frame.id) for frame in flight.watch.end()]
        session.flight = None

    def _take(self, session: Session, flight: CallsInFlight, frame: Frame, now: float, events: list[Event]) -> None:
        if isinstance(frame, TrapFrame):
            flight.wanted = None
        elif isinstance(frame, BadFrame):
            _refuse(flight, Call("", "", frame.span, id=frame.id), frame.problem)
        elif problem := _reached_limit(flight):
            _refuse(flight, frame, problem)
        else:
            self._call(session, flight, frame, now, events)

    def _call(self, session: Session, flight: CallsInFlight, call: Call, now: float, events: list[Event]) -> None:
        """A call is complete: start it, unless it starts at the next trap."""
        events.append(Called(session.request.id, call))
        mode = flight.markup.mode(call)
        if mode == "parallel":
            flight.postponed.append(call)
            return
        if mode == "sync" and flight.wanted is not None:
            flight.wanted.add(call.id)
        self._start(session, flight, call, now)

    def _start(self, session: Session, flight: CallsInFlight, call: Call, now: float) -> None:
        request = session.request
        pending_call = session.pending(call, (request.id, "async", call.id), call.expected_s)
        flight.pending[call.id] = PendingAsyncCall(call, pending_call, now)
        self._scheduler.begin_call(pending_call, now)
        self._dispatcher.start(request.id, call, request.tools, request.tenant)

    def _trap(self, session: Session, flight: CallsInFlight, now: float, events: list[Event]) -> None:
        """Start the calls that wait for a trap, and wait for every pending call."""
        for call in flight.postponed:
            self._start(session, flight, call, now)
        flight.postponed.clear()
        self._wait(session, flight, flight.pending.keys(), now, events)

    def _wait(self, session: Session, flight: CallsInFlight, ids: Set[str], now: float, events: list[Event]) -> None:
        """Pause the request until these calls have returned; nothing happens if there are none."""
        awaited = [pending for call_id, pending in flight.pending.items() if call_id in ids]
        flight.wanted = set()
        if not awaited:
            return
        calls = tuple(pending.call for pending in awaited)
        flight.awaited = {call.id: None for call in calls}
        pending_calls = tuple(pending.pending._replace(head_start_s=now - pending.began_s) for pending in awaited)
        self._scheduler.intercept(session.sequence, now, pending_calls, begun=True)
        session.interceptions.append(Interception(calls, began_s=now))
        events.append(Intercepted(session.request.id, calls))

    def _resume(self, session: Session, flight: CallsInFlight, events: list[Event]) -> None:
        """Every call of the trap has returned: append all results, and queue the request again."""
        sequence, pause = session.sequence, session.interceptions[-1]
        results = tuple(result for result in flight.awaited.values() if result is not None)
        flight.awaited = {}
        began = [call.head_start_s for call in sequence.calls]
        lasted_s = max(result.duration_s - start_s for result, start_s in zip(results, began, strict=True))
        waited_s, number = self._clock.now() - sequence.paused_s, len(session.interrupts)
        tokens, shown = self._read_queue(session, flight)
        span = (len(session.stream) - len(tokens), len(session.stream))
        session.resumed_s = self._clock.now()
        duration_s = min(waited_s, max(0.0, lasted_s))
        session.interceptions[-1] = Interception(pause.calls, results, span, duration_s, began_s=pause.began_s)
        self._scheduler.resume(sequence, tokens)
        interrupts = tuple(session.interrupts[number:])
        events.append(Resumed(session.request.id, results, tuple(tokens), shown, interrupts))

    def _inject(self, session: Session, flight: CallsInFlight, events: list[Event]) -> None:
        """Append all queued results to a request that goes on."""
        if flight.queue:
            number = len(session.interrupts)
            tokens, shown = self._read_queue(session, flight)
            self._scheduler.inject(session.sequence, tokens)
            interrupts = tuple(session.interrupts[number:])
            events.append(Interrupted(session.request.id, interrupts, tuple(tokens), shown))

    def _read_queue(self, session: Session, flight: CallsInFlight) -> tuple[list[int], str]:
        """The queued results as tokens, cut to the model's length, and their text; they are in the request's stream now."""
        tokens: list[int] = []
        room = self._scheduler.max_model_len - len(session.sequence.tokens) - 1
        for call, result in flight.queue:
            frame, used = flight.markup.interrupt(call, result, room - len(tokens))
            start = len(session.stream) + len(tokens)
            tokens += frame
            session.interrupts.append(Interrupt(call, used, (start, start + len(frame))))
        flight.queue.clear()
        return tokens, session.append_external(tokens)


def _reached_limit(flight: CallsInFlight) -> str:
    """Why one more call may not begin; "" if it may, and then it is counted."""
    most, shared = flight.markup.max_pending, flight.markup.shared_limit
    if len(flight.pending) + len(flight.postponed) >= most:
        return f"{most} calls are pending, wait for them first"
    return "" if shared is None or shared.take() else "too many calls of other requests are pending, call again later"


def _release(flight: CallsInFlight, number: int) -> None:
    """Uncount calls that are pending no more."""
    if flight.markup.shared_limit is not None:
        flight.markup.shared_limit.release(number)


def _refuse(flight: CallsInFlight, call: Call, problem: str) -> None:
    """Answer markup that calls nothing."""
    flight.queue.append((call, Result(f"error: {problem}", "error")))


def _is_clean(session: Session, flight: CallsInFlight) -> bool:
    return flight.watch.clean and not (session.text and session.text.half_character)
