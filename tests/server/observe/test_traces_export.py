"""Traces on their way out: to a collector that answers, hangs or is not there; and whether they are wanted at all."""

import ast
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from jinfercept.errors import ConfigError
from jinfercept.server.observe import traces
from jinfercept.server.observe import traces_choice as choice_module
from jinfercept.server.observe.traces_choice import TracesChoice, traces_choice
from jinfercept.server.options import ServerOptions
from tests.support.live_server import MODEL, running
from tests.support.scripted_model import Scripted
from tests.support.tool_server import QUESTION

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
        (URL, {}, TracesChoice(f"{URL}/v1/traces", False)),
        (f"{URL}/", {}, TracesChoice(f"{URL}/v1/traces", False)),
        ("https://[::1]:4318/otlp?x=1", {}, TracesChoice("https://[::1]:4318/otlp?x=1", False)),
        (URL, {"OTEL_TRACES_EXPORTER": "none"}, TracesChoice(f"{URL}/v1/traces", False)),
        (None, {ENDPOINT: URL}, TracesChoice(None, False)),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, TracesChoice(None, False)),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, TracesChoice(None, False)),
        (None, {ENDPOINT: URL, "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {ENDPOINT: URL, "OTEL_SDK_DISABLED": "TRUE"}, None),
        (None, {ENDPOINT: URL, "OTEL_TRACES_EXPORTER": "zipkin"}, None),
        (None, {ENDPOINT: URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        (None, {"OTEL_SERVICE_NAME": "shop"}, None),
    ],
)
def test_traces_are_off_unless_a_flag_or_the_environment_asks(
    flag: str | None, environ: Mapping[str, str], chosen: TracesChoice | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert traces_choice(flag, False, environ) == chosen
    assert ("stay off" in caplog.text) == ("zipkin" in environ.values() or "grpc" in environ.values())


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://x:99999", "http://["]
)
def test_a_flag_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is not a URL"):
        ServerOptions(otlp_traces_endpoint=url)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(choice_module, "_is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"jinfercept\[otel\]"):
        ServerOptions(otlp_traces_endpoint=URL)
    assert traces_choice(None, False, {ENDPOINT: URL}) is None
    assert "jinfercept[otel]" in caplog.text


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    for file in PACKAGE.rglob("*.py"):
        names = {
            name
            for name in imported_at_once(file)
            if re.match(r"opentelemetry|jinfercept\.server\.observe\.traces\.", name)
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
