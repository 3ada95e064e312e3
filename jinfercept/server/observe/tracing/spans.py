"""From what is known of a finished request to OpenTelemetry spans: phases, calls, counts, links.

Names of attributes are those of the semantic conventions for generative AI where there are some, else `jinfercept.*`.
"""

import json
import time
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, Status, StatusCode, Tracer

from jinfercept.calls import Call, Result
from jinfercept.meter.timelines import Phase, Timeline
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request

MOST_CHARS = 16384
"""Maximum characters of one text in an attribute."""
_MOST_INT = 2**63 - 1
"""Largest integer that OTLP can carry; the SDK logs a traceback for each larger one."""


@dataclass(slots=True)
class CallSpan:
    """A call that the server runs. Its own thread ends it; its span is ended with the trace.

    Attributes:
        context: headers that pass the span's context on.
        status: as of `calls.Result`; "running" until the call has ended.
        end_ns: nanoseconds since 1970; 0 until the call has ended.
    """

    span: Span
    request_id: str
    name: str
    call_id: str
    context: Mapping[str, str]
    arguments: str
    status: str = "running"
    end_ns: int = 0

    def end(self, error: BaseException | None = None) -> None:
        self.end_ns = time.time_ns()
        if error is None:
            self.status = "ok"
        elif isinstance(error, TimeoutError):
            self.status = "timeout"
        else:
            self.status = "cancelled" if isinstance(error, CancelledError) else "error"


def request_attributes(requests: Sequence[Request]) -> dict[str, Any]:
    """Attributes of a root span about the requests' parameters."""
    params = requests[0].params
    values = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "choice.count": len(requests),
    }
    attributes = {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}
    return {name: max(-_MOST_INT, min(_MOST_INT, value)) for name, value in attributes.items()}


@final
class SpanWriter:
    """Writes the spans of one trace.

    Args:
        tracer: starts spans.
        root: span of the HTTP request.
        epoch_ns: nanoseconds since 1970 at second 0 of the engine's clock.
        texts: whether spans have texts.
    """

    def __init__(self, tracer: Tracer, root: Span, context: Context, epoch_ns: int, *, texts: bool) -> None:
        self._tracer, self._root, self._context = tracer, root, context
        self._epoch_ns, self._texts = epoch_ns, texts

    def write(
        self,
        timeline: Timeline,
        output: RequestOutput | None,
        calls: list[CallSpan],
        late: Sequence[tuple[Call, Result]],
        choice: int | None,
    ) -> None:
        """The spans of one engine request.

        Args:
            output: None if the engine lost the request.
            calls: of the server's tools.
            late: calls that ran after the request had ended, with their results.
            choice: place of the request among several of one body.
        """
        common = {} if choice is None else {"jinfercept.choice": choice}
        self._link(timeline)
        for phase in timeline.phases:
            if phase.kind != "pause":
                attributes, start_s = common | _phase_attributes(phase), self._ns(phase.start_s)
                span = self._tracer.start_span(phase.kind, self._context, attributes=attributes, start_time=start_s)
                span.end(self._ns(phase.end_s))
        pauses = {phase.number: phase for phase in timeline.phases if phase.kind == "pause"}
        waiting = list(calls)
        completion = output.outputs[0] if output is not None else None
        for number, pause in enumerate(completion.interceptions if completion is not None else (), 1):
            attributes = common | {"jinfercept.interception": number}
            for place, call in enumerate(pause.calls):
                result = pause.results[place] if place < len(pause.results) else None
                self._call(call, result, waiting, pauses.get(number), attributes)
        answered = (
            [(interrupt.call, interrupt.result) for interrupt in completion.interrupts]
            if completion is not None
            else []
        )
        for call, result in [*answered, *late]:
            self._call(call, result, waiting, None, common)
        for call_span in waiting:
            self._end_call(call_span, None, common)
        if timeline.num_dropped:
            self._root.set_attribute("jinfercept.dropped_phases", timeline.num_dropped)

    def end(
        self, requests: Sequence[Request], outputs: Sequence[RequestOutput], details: Mapping[str, Any], status: int
    ) -> None:
        """End the root span.

        Args:
            details: fields of the request's log line.
            status: of the response; 0 if there was none.
        """
        root = self._root
        reasons = [output_metrics.finish_reason for output in outputs for output_metrics in output.outputs]
        metrics = [output.metrics for output in outputs]
        sums = {
            "gen_ai.response.id": details.get("id"),
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.usage.input_tokens": details.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": details.get("completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": details.get("cached_tokens"),
            "http.response.status_code": status or None,
            "jinfercept.request_id": details.get("request_id"),
            "jinfercept.key": details.get("key"),
        }
        if metrics:
            sums["jinfercept.recomputed_tokens"] = sum(output_metrics.recomputed_tokens for output_metrics in metrics)
            sums["jinfercept.offloaded_tokens"] = sum(output_metrics.copied_out_tokens for output_metrics in metrics)
            sums["jinfercept.fetched_tokens"] = sum(output_metrics.copied_in_tokens for output_metrics in metrics)
            sums["jinfercept.preemptions"] = sum(output_metrics.preemptions for output_metrics in metrics)
        root.set_attributes({name: value for name, value in sums.items() if value is not None})
        if self._texts and requests:
            root.set_attributes(_texts(requests, outputs))
        failed = next((reason for reason in reasons if reason in ("error", "abort")), None)
        if status >= 400 or failed is not None:
            root.set_attribute("error.type", f"{status}" if status >= 400 else f"{failed}")
        if status >= 500 or failed == "error":
            root.set_status(Status(StatusCode.ERROR))
        root.end()

    # -- the parts -------------------------------------------------------------------------------------------------

    def _link(self, timeline: Timeline) -> None:
        """A link to the finished request whose context this one extends, and the time between the two."""
        follows = timeline.follows
        if follows is None or not timeline.phases:
            return
        arrival_s = timeline.phases[0].start_s
        values = {"gen_ai.tool.name": follows.tool, "jinfercept.seconds": arrival_s - follows.began_s}
        if isinstance(follows.mark, SpanContext):
            self._root.add_link(follows.mark, values)
        self._root.add_event("jinfercept.follow_up", values, self._ns(arrival_s))

    def _call(
        self,
        call: Call,
        result: Result | None,
        waiting: list[CallSpan],
        pause: Phase | None,
        attributes: Mapping[str, Any],
    ) -> None:
        """The span of a call whose result the model has read, or has not, if it is None."""
        ran = next(
            (call_span for call_span in waiting if (call_span.name, call_span.call_id) == (call.name, call.id)), None
        )
        if ran is not None:
            waiting.remove(ran)
            self._end_call(ran, result, attributes)
        elif pause is not None:  # no tool of this server ran
            span = self._tracer.start_span(
                f"execute_tool {call.name}", self._context, start_time=self._ns(pause.start_s)
            )
            new_span = CallSpan(span, "", call.name, call.id, {}, call.arguments, "cancelled", self._ns(pause.end_s))
            self._end_call(new_span, result, attributes)

    def _end_call(self, call_span: CallSpan, result: Result | None, attributes: Mapping[str, Any]) -> None:
        status = call_span.status if result is None or result.status == "started" else result.status
        status = "cancelled" if status == "running" else status
        values = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call_span.name,
            "gen_ai.tool.type": "function",
            "jinfercept.call.status": status,
        }
        if call_span.call_id:
            values["gen_ai.tool.call.id"] = call_span.call_id
        if self._texts:
            values["gen_ai.tool.call.arguments"] = call_span.arguments[:MOST_CHARS]
            if result is not None:
                values["gen_ai.tool.call.result"] = result.text[:MOST_CHARS]
        call_span.span.set_attributes(dict(attributes) | values)
        if status not in ("ok", "empty"):
            call_span.span.set_attribute("error.type", status)
            call_span.span.set_status(Status(StatusCode.ERROR))
        call_span.span.end(call_span.end_ns or time.time_ns())

    def _ns(self, at_s: float) -> int:
        """Nanoseconds since 1970 of a time of the engine's clock."""
        return round(at_s * 1e9) + self._epoch_ns


def _phase_attributes(phase: Phase) -> dict[str, Any]:
    values: dict[str, Any] = {"jinfercept.interception": phase.number}
    if phase.kind != "queue":
        values["jinfercept.tokens"] = phase.tokens
    return values


def _texts(requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> dict[str, str]:
    """The rendered prompts and the generated texts, each as one part of a message."""
    prompts = [("user", request.prompt) for request in requests if request.leader is None and request.prompt]
    answers = [("assistant", completion.text) for output in outputs for completion in output.outputs]
    return {"gen_ai.input.messages": _messages(prompts), "gen_ai.output.messages": _messages(answers)}


def _messages(texts: Sequence[tuple[str, str]]) -> str:
    shown = [
        {"role": role, "parts": [{"type": "text", "content": text[: MOST_CHARS // len(texts)]}]} for role, text in texts
    ]
    return json.dumps(shown, ensure_ascii=False)
