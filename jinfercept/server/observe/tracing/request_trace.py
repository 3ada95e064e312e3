"""The trace of one HTTP request while it is served: its root span, its engine requests, the calls that they make.

Methods are called on the event loop, but `Tracing.tool`'s functions and `CallSpan` run on the threads of calls.
"""

import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jinfercept.calls import Call, Result
from jinfercept.chat.function_tools import ChatTool
from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.intercept.current_call import CURRENT_CALL, around
from jinfercept.intercept.tool_run import ToolRun
from jinfercept.meter.timelines import Timeline, Timelines
from jinfercept.request import Request
from jinfercept.server.observe.tracing.spans import CallSpan, SpanWriter, request_attributes
from jinfercept.version import __version__

log = logging.getLogger(__name__)

_PROPAGATOR = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")


@final
class Tracing:
    """The traces of one server.

    Args:
        provider: samples and exports spans.
        close: exports what is left, within seconds.
        texts: whether spans have prompts, answers, arguments and results.

    Attributes:
        by_request: traces by the ids of their engine requests that are not over.
        timelines: of these requests.
    """

    def __init__(self, provider: TracerProvider, close: Callable[[float], object], *, texts: bool = False) -> None:
        self.texts, self._close = texts, close
        self.tracer = provider.get_tracer("jinfercept", __version__)
        self.by_request: dict[str, RequestTrace] = {}
        self.timelines = Timelines()

    def begin(
        self, operation: str, route: str, headers: Sequence[tuple[bytes, bytes]], details: Mapping[str, Any]
    ) -> "RequestTrace":
        """The trace of a request whose root span begins now, below that of the client's headers.

        Args:
            operation: `gen_ai.operation.name`.
            route: path of the route.
            headers: of the request, by lower-case names.
            details: fields of the request's log line; read when the trace ends.
        """
        carrier = {name: [] for name in _HEADERS}
        for name, value in headers:
            if (key := name.decode("latin-1")) in carrier:
                carrier[key].append(value.decode("latin-1"))
        trace_headers = {name: ",".join(values) for name, values in carrier.items() if values}
        return RequestTrace(self, operation, route, _PROPAGATOR.extract(trace_headers, Context()), details)

    def tool(self, tool: ChatTool) -> ChatTool:
        """A copy of a tool whose calls by requests of a trace are spans, and pass the trace's context on."""
        assert tool.tool is not None, "a tool that runs here"
        function, name = tool.tool.function, tool.name

        def call(arguments: str) -> object:
            here = CURRENT_CALL.get()
            trace = self.by_request.get(here.request_id)
            if trace is None:
                return function(arguments)
            span = trace.begin_call(here.request_id, name, here.id, arguments)
            CURRENT_CALL.set(replace(here, trace=span.context))  # in the context of the call
            try:
                value = function(arguments)
            except BaseException as error:
                span.end(error)
                raise
            if isinstance(value, ToolRun):
                value.result.add_done_callback(lambda result: span.end(result.exception()))
                return value
            if inspect.isawaitable(value):
                return _ended(value, span)
            span.end()
            return value

        return replace(tool, tool=replace(tool.tool, function=around(function, call)))

    def close(self, timeout_s: float) -> None:
        """Export what is left, as far as the collector takes it in time."""
        self._close(timeout_s)


@final
class RequestTrace:
    """The trace of one HTTP request. It ends when every holder has released it; the first holder is the one that made it.

    Args:
        operation: `gen_ai.operation.name`.
        route: path of the route.
        parent: the client's context, if it sent one.
        details: fields of the request's log line; read when the trace ends.
    """

    def __init__(
        self, tracing: Tracing, operation: str, route: str, parent: Context, details: Mapping[str, Any]
    ) -> None:
        self._tracing, self._epoch_ns = tracing, time.time_ns() - time.monotonic_ns()
        self._details, self._status = details, 0
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jinfercept",
            "http.request.method": "POST",
            "http.route": route,
        }
        self.root: Span = tracing.tracer.start_span(operation, parent, SpanKind.SERVER, attributes)
        self._is_recording = self.root.is_recording()
        self._operation, self._context = operation, set_span_in_context(self.root, Context())
        self._holders = 1
        self._requests: list[Request] = []
        self._timelines: dict[str, Timeline] = {}
        self._streams: list[AsyncStream] = []
        self._calls: list[CallSpan] = []
        self._lock = threading.Lock()  # of `_calls`
        self._late: list[tuple[str, Call, Result]] = []  # results of calls that ran after their request

    def name_model(self, requested: str | None, answering: str) -> None:
        """Note the model that the body names, and the one that answers."""
        self.root.update_name(f"{self._operation} {answering}")
        self.root.set_attributes({"gen_ai.request.model": requested or answering, "gen_ai.response.model": answering})

    def name_conversation(self, name: str | None) -> None:
        """Note the client's name of the conversation, if it has one."""
        if name:
            self.root.set_attribute("gen_ai.conversation.id", name)

    def attach(self, requests: Sequence[Request]) -> Timelines | None:
        """Note engine requests that are submitted next; returns where their timelines are, None if the trace is not sampled."""
        self._requests += requests
        self._tracing.by_request.update(dict.fromkeys([request.id for request in requests], self))
        if not self._is_recording:
            return None
        self.root.set_attributes(request_attributes(self._requests))
        timelines = {request.id: Timeline(self.root.get_span_context()) for request in requests}
        self._timelines |= timelines
        self._tracing.timelines.add(timelines)
        return self._tracing.timelines

    def watch(self, stream: AsyncStream) -> None:
        """Note the stream of submitted requests, which has their outputs at the end."""
        self._streams.append(stream)

    def begin_call(self, request_id: str, name: str, call_id: str, arguments: str) -> CallSpan:
        """A call of a tool begins, on any thread."""
        span = self._tracing.tracer.start_span(f"execute_tool {name}", self._context)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        call_span = CallSpan(span, request_id, name, call_id, carrier, arguments)
        with self._lock:
            self._calls.append(call_span)
        return call_span

    def note_results(self, request: Request, calls: Sequence[Call], results: Sequence[Result]) -> None:
        """Note results of calls that ran after the end of their engine request."""
        self._late += [(request.id, call, result) for call, result in zip(calls, results, strict=True)]

    def hold(self) -> None:
        """Add a holder: work that goes on behind the response."""
        self._holders += 1

    def release(self, status: int | None = None) -> None:
        """Remove a holder; the last one ends the trace.

        Args:
            status: of the response.
        """
        self._status = status or self._status
        self._holders -= 1
        if self._holders:
            return
        for request in self._requests:
            self._tracing.by_request.pop(request.id, None)
        try:
            self._end()
        except Exception:  # a trace is no reason to fail a request
            log.exception("the spans of a request are lost")

    def _end(self) -> None:
        if not self._is_recording:
            return
        outputs = {name: output for stream in self._streams for name, output in stream.outputs.items()}
        writer = SpanWriter(self._tracing.tracer, self.root, self._context, self._epoch_ns, texts=self._tracing.texts)
        with self._lock:
            calls, self._calls = self._calls, []
        for place, request in enumerate(self._requests):
            choice = place if len(self._requests) > 1 else None
            own_calls = [call_span for call_span in calls if call_span.request_id == request.id]
            late = [(call, result) for name, call, result in self._late if name == request.id]
            writer.write(self._timelines[request.id], outputs.get(request.id), own_calls, late, choice)
        writer.end(self._requests, list(outputs.values()), self._details, self._status)


async def _ended(value: Awaitable[object], call_span: CallSpan) -> object:
    try:
        result = await value
    except BaseException as error:
        call_span.end(error)
        raise
    call_span.end()
    return result
