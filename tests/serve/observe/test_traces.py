"""Traces of requests: their spans, what they say and hide, and how the context of a trace comes in and goes on."""

import ast
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from jinfercept.calls import Tool
from jinfercept.engine.tool_executor import CURRENT_CALL
from jinfercept.errors import ConfigError
from jinfercept.serve import options as options_module
from jinfercept.serve.observe import traces
from jinfercept.serve.observe.traces import Tracing
from jinfercept.serve.options import ServerOptions, traces_endpoint
from tests.support.live_server import MODEL, Running, running, until
from tests.support.scripted_model import Scripted
from tests.support.tool_server import ALL, QUESTION, ask, called, returned, says

PACKAGE = Path(__file__).parents[3] / "jinfercept"
URL = "http://127.0.0.1:4318"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector(ThreadingHTTPServer):
    """Receives OTLP over HTTP. With `hang` it never answers.

    Attributes:
        received: paths and requests.
        requested: set by the first request.
    """

    daemon_threads = True

    def __init__(self, hang: bool) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.received: list[tuple[str, ExportTraceServiceRequest]] = []
        self.requested, self.go = threading.Event(), threading.Event()
        if not hang:
            self.go.set()


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requested.set()
        self.server.go.wait(60)
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collector(*, hang: bool = False) -> Iterator[Collector]:
    with Collector(hang) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.go.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick export."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def test_spans_reach_a_collector_before_the_server_ends(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop,deployment.environment.name=test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with collector() as there:
        with running(scripted.llm, otlp_traces_endpoint=f"http://127.0.0.1:{there.server_address[1]}") as server:
            assert server.chat(messages=QUESTION).status_code == 200
        [(path, sent)] = there.received
    [resource] = sent.resource_spans
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (path, named["service.name"], named["deployment.environment.name"]) == ("/v1/traces", "shop", "test")
    [scope] = resource.scope_spans
    assert (scope.scope.name, [span.name for span in scope.spans]) == ("jinfercept", [f"chat {MODEL}"])


@pytest.mark.parametrize("kind", ["absent", "hangs"])
def test_a_collector_that_does_not_answer_costs_spans_only(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(traces, "CLOSING_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with collector(hang=True) as there:
        port = there.server_address[1] if kind == "hangs" else 9  # nothing listens at the port of `discard`
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}/v1/traces")
        with running(scripted.llm) as server:
            for _ in range(4):
                assert server.chat(messages=QUESTION).status_code == 200
            if kind == "hangs":
                assert there.requested.wait(60)
            assert server.chat(messages=QUESTION).status_code == 200
        assert not there.received


@pytest.mark.parametrize(
    ("flag", "environ", "chosen"),
    [
        (None, {}, None),
        (URL, {}, f"{URL}/v1/traces"),
        (f"{URL}/", {}, f"{URL}/v1/traces"),
        ("https://[::1]:4318/otlp?x=1", {}, "https://[::1]:4318/otlp?x=1"),
        (None, {ENDPOINT: URL}, ""),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, ""),
        (None, {"OTEL_SERVICE_NAME": "shop"}, None),
    ],
)
def test_traces_are_off_unless_a_flag_or_the_environment_asks(
    flag: str | None, environ: Mapping[str, str], chosen: str | None
) -> None:
    assert traces_endpoint(flag, environ) == chosen


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://x:99999", "http://["]
)
def test_a_flag_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is not a URL"):
        ServerOptions(otlp_traces_endpoint=url)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(options_module, "traces_are_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"jinfercept\[otel\]"):
        ServerOptions(otlp_traces_endpoint=URL)
    assert traces_endpoint(None, {ENDPOINT: URL}) is None
    assert "jinfercept[otel]" in caplog.text


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    for file in PACKAGE.rglob("*.py"):
        names = {
            name
            for name in imported_at_once(file)
            if re.match(r"opentelemetry|jinfercept\.serve\.observe\.traces\.", name)
        }
        assert not names or file.stem == "traces", file


def imported_at_once(file: Path) -> set[str]:
    """Names of the modules that a file imports when it is imported itself, if some concern traces."""
    exported: set[str] = set()
    source = file.read_text(encoding="utf-8")
    if "opentelemetry" not in source and "observe.traces" not in source:
        return exported  # parsing takes most of the time
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            exported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            exported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return exported


TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=opaque"}


class Spans:
    """The spans that a server has exported to memory."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def __call__(self, number: int = 1) -> list[ReadableSpan]:
        """All spans, once so many requests are traced: a trace ends behind the response."""
        until(lambda: sum(span.kind is SpanKind.SERVER for span in self._exporter.get_finished_spans()) == number)
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    @property
    def none(self) -> bool:
        """Whether there are none."""
        return not self._exporter.get_finished_spans()


def traced(server: Running, *, sampler: Any = None) -> Spans:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.service.trace_to(Tracing(provider))
    return Spans(exporter)


@pytest.fixture
def untraced(server: Running) -> Iterator[Running]:
    """The server with tools; its traces are off afterwards."""
    yield server
    server.service.tracing, server.service.tools.traced = None, lambda tool: tool


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_chat_with_a_call_is_a_span_with_one_for_its_pause(untraced: Running, scripted: Scripted) -> None:
    server, spans = untraced, traced(untraced)
    says(scripted, server, "It costs 23.", [*QUESTION, called("", ("price", "lamp")), returned("23")])
    done = ask(server, QUESTION, extra_headers=HEADERS | {"x-session-id": "ticket-7", "x-request-id": "order-17"})
    [root, *children] = spans()
    assert (root.name, root.kind, root.status.status_code) == (f"chat {MODEL}", SpanKind.SERVER, StatusCode.UNSET)
    assert root.parent is not None
    assert root.context is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    values, usage = attributes(root), done.usage
    assert values.pop("gen_ai.usage.cache_read.input_tokens") == usage.prompt_tokens_details.cached_tokens
    assert values.pop("jinfercept.offloaded_tokens") >= 0
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jinfercept",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": done.id,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.conversation.id": "ticket-7",
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "jinfercept.request_id": "order-17",
        "jinfercept.recomputed_tokens": 0,
        "jinfercept.fetched_tokens": 0,
        "jinfercept.preemptions": 0,
    }
    [call] = children
    assert call.parent is not None
    assert call.parent.span_id == root.context.span_id
    assert (root.start_time or 0) < (call.start_time or 0) < (call.end_time or 0) < (root.end_time or 0)
    assert (call.name, call.status.status_code) == ("execute_tool price", StatusCode.UNSET)
    values = attributes(call)
    assert values.pop("jinfercept.kept_tokens") > 0
    assert values == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "price",
        "jinfercept.call.status": ("ok",),
        "jinfercept.interception": 1,
        "jinfercept.copied_in_tokens": 0,
        "jinfercept.recomputed_tokens": 0,
    }
    assert not re.search("How much|lamp|costs", "".join(child.to_json() for child in [root, *children]))


@pytest.mark.parametrize(
    ("name", "item", "status", "result"),
    [
        ("price", "moon", "error", "error: ValueError: not for sale"),
        ("price", "", "empty", "(nothing)"),
        ("hang", None, "timeout", "error: TimeoutError: it took longer than 0.3 s"),
        ("fly", None, "unknown_tool", "error: no tool 'fly' (there are: hang, price)"),
    ],
)
def test_a_call_says_what_came_of_it(
    untraced: Running, scripted: Scripted, name: str, item: str | None, status: str, result: str
) -> None:
    server, spans = untraced, traced(untraced)
    says(scripted, server, "Sorry.", [*QUESTION, called("", (name, item)), returned(result)])
    assert ask(server, QUESTION, stream=False).choices[0].message.content == "Sorry."
    [call] = [child for child in spans() if child.name == f"execute_tool {name}"]
    values = attributes(call)
    assert values["jinfercept.call.status"] == (status,)
    assert values.get("error.type") == (None if status == "empty" else status)


def test_a_response_in_the_background_is_traced_to_its_end(untraced: Running, scripted: Scripted) -> None:
    server, spans = untraced, traced(untraced)
    says(scripted, server, "It costs 23.", [*QUESTION, called("", ("price", "lamp")), returned("23")])
    create: Any = server.client.responses.create
    begun = create(model=MODEL, input=QUESTION[0]["content"], temperature=0, background=True, extra_body=ALL)
    root = spans()[0]
    assert server.client.responses.retrieve(begun.id).status == "completed"
    assert attributes(root)["gen_ai.response.id"] == begun.id
    assert attributes(root)["gen_ai.usage.output_tokens"] > 0


def test_refused_requests_are_spans_and_strangers_make_none(scripted: Scripted) -> None:
    with running(scripted.llm, api_key=("secret",)) as server:
        spans = traced(server)
        assert server.chat().status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert spans.none
        broken = {"traceparent": "00-nonsense", "tracestate": "=" * 9000}
        url = "/v1/chat/completions"
        assert server.http.post(url, json={"messages": 3}, headers=headers | broken).status_code == 400
        [root] = spans()
        assert (root.name, root.parent, root.status.status_code) == ("chat", None, StatusCode.UNSET)
        assert attributes(root)["error.type"] == "400"
        assert attributes(root)["jinfercept.key"] == server.service.keys.name(next(iter(server.service.keys.tenants)))


@pytest.mark.parametrize("sampled", [True, False])
def test_tools_get_the_context_of_their_call(untraced: Running, scripted: Scripted, sampled: bool) -> None:
    server, spans = untraced, traced(untraced, sampler=None if sampled else ALWAYS_OFF)
    seen: list[dict[str, str]] = []

    def price(arguments: str) -> str:
        seen.append(dict(CURRENT_CALL.get().trace))
        return "23"

    [listed] = [tool for tool in server.service.tools.offered(["price"], ()) if tool.tool]
    inner, tracing = listed.tool, server.service.tracing
    assert inner is not None
    assert tracing is not None
    server.service.tools.traced = lambda tool: tracing.tool(
        type(tool)(tool.declaration, Tool(price if tool.name == "price" else inner.function, name=tool.name))
    )
    says(scripted, server, "It costs 23.", [*QUESTION, called("", ("price", "lamp")), returned("23")])
    ask(server, QUESTION, extra_headers=HEADERS)
    [context] = seen
    assert context["tracestate"] == "vendor=opaque"
    version, trace_id, span_id, flags = context["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "01" if sampled else "00")
    if sampled:
        [root, _] = spans()
        assert root.context is not None
        assert span_id == f"{root.context.span_id:016x}"
    else:
        assert spans.none


def test_numbers_too_large_for_a_collector_are_no_part_of_a_span(
    untraced: Running, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    spans = traced(untraced)
    assert untraced.chat(max_tokens=10**30, seed=2**64 - 1, stop_token_ids=list(range(256))).status_code == 200
    encode_spans(spans())
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    # the exporter of another test misses its collector
    assert not [record for record in warnings if "trace_exporter" not in record.name]
