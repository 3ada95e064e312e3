"""OpenTelemetry traces: one span for each HTTP request that generates, and one below it for each of its pauses.

The spans of pauses are made of the request's outputs when it has ended. Only this module imports `opentelemetry`, and it is
imported only when traces are on. The SDK's own environment variables hold. No global provider is set, so that other
instrumented packages of the process are not affected.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from jinfercept.chat.function_tools import ChatTool
from jinfercept.engine.streaming import AsyncStream
from jinfercept.engine.tool_executor import CURRENT_CALL, around
from jinfercept.outputs import Interception, RequestOutput
from jinfercept.request import Request
from jinfercept.version import __version__

log = logging.getLogger(__name__)

CLOSING_S = 3.0
"""Seconds that the last spans have to reach the collector when the server ends, if so many are left."""
_PROPAGATOR = TraceContextTextMapPropagator()
_COUNTS = {
    "recomputed_tokens": "recomputed_tokens",
    "offloaded_tokens": "copied_out_tokens",
    "fetched_tokens": "copied_in_tokens",
    "preemptions": "preemptions",
}
"""Attributes by the counts of an output's metrics."""
_DETAILS = {
    "gen_ai.response.id": "id",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "jinfercept.request_id": "request_id",
    "jinfercept.key": "key",
}
"""Attributes by the fields of the request's log line."""


def open_tracing(endpoint: str) -> "Tracing":
    """Traces that are exported to what `traces_endpoint` has returned.

    A collector that does not answer loses spans, beyond a bounded queue, and nothing else.
    """
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    default = {} if named else {"service.name": "jinfercept"}  # attributes of code take precedence over variables
    resource = Resource.create({"service.version": __version__} | default)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    return Tracing(provider)


@final
class Tracing:
    """The traces of one server. `headers` have the W3C trace context of each engine request that is not over, for its tools."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("jinfercept", __version__)
        self.headers: dict[str, Mapping[str, str]] = {}

    def tool(self, tool: ChatTool) -> ChatTool:
        """A copy of a tool whose calls pass the trace of their request on."""
        assert tool.tool is not None, "a tool that runs here"
        function = tool.tool.function

        def call(arguments: str) -> object:
            here = CURRENT_CALL.get()
            CURRENT_CALL.set(replace(here, trace=self.headers.get(here.request_id, {})))  # in the context of the call
            return function(arguments)

        return replace(tool, tool=replace(tool.tool, function=around(function, call)))

    def close(self, timeout_s: float) -> None:
        """Export what is left, as far as the collector takes it in time."""
        thread = threading.Thread(target=self._provider.shutdown, name="jinfercept-traces", daemon=True)
        thread.start()
        thread.join(min(timeout_s, CLOSING_S))


@final
class RequestTrace:
    """The span of one HTTP request. It ends when every holder has released it; the first holder is the one that made it.

    Args:
        operation: `gen_ai.operation.name`.
        details: fields of the request's log line; read when the span ends.
    """

    def __init__(self, tracing: Tracing, operation: str, route: str, scope: Scope, details: Mapping[str, Any]) -> None:
        self._tracing, self._operation, self._details = tracing, operation, details
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        headers = Headers(scope=scope)
        carrier = {name: ",".join(headers.getlist(name)) for name in headers}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jinfercept",
            "http.request.method": "POST",
            "http.route": route,
        }
        self._root = tracing.tracer.start_span(
            operation, _PROPAGATOR.extract(carrier, Context()), SpanKind.SERVER, attributes
        )
        self._below = set_span_in_context(self._root, Context())
        self._status, self._holders = 0, 1
        self._requests: list[Request] = []
        self.streams: list[AsyncStream] = []

    def describe(self, model: str | None, answering: str, conversation: str | None) -> None:
        """Note the model that the body names, the one that answers, and the client's name of the conversation."""
        self._root.update_name(f"{self._operation} {answering}")
        values = {"gen_ai.request.model": model or answering, "gen_ai.response.model": answering}
        self._root.set_attributes(values | ({"gen_ai.conversation.id": conversation} if conversation else {}))

    def attach(self, requests: Sequence[Request]) -> None:
        """Note engine requests that are submitted next."""
        self._requests += requests
        headers = dict[str, str]()
        _PROPAGATOR.inject(headers, self._below)
        self._tracing.headers.update(dict.fromkeys([request.id for request in requests], headers))

    def hold(self) -> None:
        self._holders += 1

    def release(self, status: int | None = None) -> None:
        """Remove a holder; the last one ends the span. `status` is the response's."""
        self._status = status or self._status
        self._holders -= 1
        if self._holders:
            return
        for request in self._requests:
            self._tracing.headers.pop(request.id, None)
        if self._root.is_recording():
            try:
                self._end()
            except Exception:  # a trace is no reason to fail a request
                log.exception("the spans of a request are lost")

    def _end(self) -> None:
        outputs = {name: output for stream in self.streams for name, output in stream.outputs.items()}
        for place, request in enumerate(self._requests):
            output = outputs.get(request.id)
            for number, pause in enumerate(output.outputs[0].interceptions if output else (), 1):
                common = {"jinfercept.choice": place} if len(self._requests) > 1 else {}
                self._pause(pause, outputs[request.id], common | {"jinfercept.interception": number})
        self._describe_end(list(outputs.values()))
        self._root.end()

    def _pause(self, pause: Interception, output: RequestOutput, attributes: dict[str, Any]) -> None:
        names = ", ".join(dict.fromkeys(call.name for call in pause.calls))
        statuses = [result.status for result in pause.results] or ["cancelled"]
        attributes |= {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": names,
            "jinfercept.call.status": statuses,
        }
        if pause.context is not None:
            attributes |= {f"jinfercept.{name}_tokens": value for name, value in pause.context._asdict().items()}
        failed = next((status for status in statuses if status not in ("ok", "empty", "started")), None)
        if failed:
            attributes["error.type"] = failed
        end_s = pause.began_s + pause.duration_s if pause.results else output.metrics.finished_s
        start_ns, end_ns = (round(at_s * 1e9) + self._epoch_ns for at_s in (pause.began_s, end_s))
        span = self._tracing.tracer.start_span(
            f"execute_tool {names}", self._below, attributes=attributes, start_time=start_ns
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(end_ns)

    def _describe_end(self, outputs: Sequence[RequestOutput]) -> None:
        details, status, values = self._details, self._status, dict[str, Any]()
        reasons = [completion.finish_reason for output in outputs for completion in output.outputs]
        if self._requests:
            values["gen_ai.request.choice.count"] = len(self._requests)
        if outputs:
            values |= {
                f"jinfercept.{shown}": sum(getattr(output.metrics, name) for output in outputs)
                for shown, name in _COUNTS.items()
            }
        failed = next((reason for reason in reasons if reason in ("error", "abort")), None)
        values |= {name: details.get(field) for name, field in _DETAILS.items()} | {
            "gen_ai.response.finish_reasons": reasons or None,
            "http.response.status_code": status or None,
            "error.type": f"{status}" if status >= 400 else failed,
        }
        self._root.set_attributes({name: value for name, value in values.items() if value is not None})
        if status >= 500 or failed == "error":
            self._root.set_status(StatusCode.ERROR)
