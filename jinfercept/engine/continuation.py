"""Continues a request that was aborted: its sequence, its text, its calls and its reports are as they were then.

What had been generated is part of the new sequence from the start and is computed like a prompt, as far as no page of it is
found. The readers of the request (text, detector or transcript, grammar) read it again, token by token, on the host.
"""

from collections import deque
from typing import TYPE_CHECKING

from jinfercept.calls import Call
from jinfercept.events import Event
from jinfercept.hooks import BadFrame, TrapFrame
from jinfercept.outputs import CompletionOutput
from jinfercept.sched.sequence import Sequence

if TYPE_CHECKING:
    from jinfercept.engine.constraints import Constraints
    from jinfercept.engine.session import Session


def continue_sequence(sequence: Sequence, output: CompletionOutput) -> None:
    """Append what was written behind the prompt to a new sequence."""
    start = len(sequence.tokens)
    sequence.tokens.extend(output.token_ids)
    sequence.external_spans += [(start + first, start + end) for first, end in output.external_spans]
    sequence.generated = output.num_generated


def read_again(
    session: "Session", output: CompletionOutput, constraints: "Constraints"
) -> tuple[tuple[Call, ...], list[Call | BadFrame]]:
    """Bring a new session to the state in which the request with this output was aborted, but for calls that had not returned.

    Returns:
        The calls that the request waited for, none if the model was generating; and the markup of asynchronous calls whose
        results it had not read.
    """
    spans, calls, flight = deque(output.external_spans), tuple[Call, ...](), session.flight
    unread, read_spans = list[Call | BadFrame](), {interrupt.call.span for interrupt in output.interrupts}
    results = {pause.span: pause.results for pause in output.interceptions if pause.results}
    ignored: list[Event] = []
    while len(session.stream) < len(output.token_ids) or spans:
        if spans and spans[0][0] == len(session.stream):
            span = spans.popleft()
            session.append_external(output.token_ids[slice(*span)])
            if session.transcript is not None and calls:
                session.transcript.resumed(calls, results.get(span, ()))
            if flight is not None:
                flight.watch.end()  # of a text that waited at its end
                flight.wanted = set()
            if session.constraint is not None and session.constraint.ended:
                constraints.begin_turn(session)  # a text that ended waited for asynchronous calls
            calls = ()
            continue
        token = output.token_ids[len(session.stream)]
        session.stream.append(token)
        shown = session.text.add(token) if session.text is not None else ""
        if session.reads_tokens:
            calls = session.read(token, shown, ignored)
            if session.constraint is not None:
                session.constraint.accept(token)
                if calls and session.constraint.ended:
                    constraints.begin_turn(session)
        if flight is not None:
            flight.wanted = set() if flight.watch.clean else flight.wanted  # a trap that waited for nothing
            raw = session.text.last_raw if session.text else ""
            for frame in flight.watch.feed(len(session.stream) - 1, token, raw):
                if isinstance(frame, TrapFrame):
                    flight.wanted = None
                elif frame.span not in read_spans:
                    unread.append(frame)
    if flight is not None and output.interceptions and not (pause := output.interceptions[-1]).results:
        calls = pause.calls
        if session.constraint is not None and session.constraint.ended:
            constraints.begin_turn(session)
    session.interrupts = list(output.interrupts)
    session.interceptions = [pause for pause in output.interceptions if pause.results]
    session.versions = list(output.version_runs)
    session.version = session.versions[-1][1] if session.versions else -1
    session.external_spans = list(output.external_spans)
    unknown = [None] * len(output.token_ids)
    session.logprobs = list(output.logprobs or unknown)
    session.processed = list(output.processed_logprobs or unknown)
    session.kept = list(output.kept_tokens.sets if output.kept_tokens else unknown)
    return calls, unread
