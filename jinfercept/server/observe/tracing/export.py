"""The OpenTelemetry SDK of one server: a provider with a batch processor whose thread sends spans over OTLP/HTTP.

The SDK's own environment variables hold: samplers (`OTEL_TRACES_SAMPLER`), resource (`OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES`), batches (`OTEL_BSP_*`), headers and certificates (`OTEL_EXPORTER_OTLP_*`), limits of spans. No
global provider is set: other instrumented packages of the process are not affected.
"""

import os
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from jinfercept.server.observe.tracing.choice import TracesChoice
from jinfercept.server.observe.tracing.request_trace import Tracing
from jinfercept.version import __version__

CLOSING_S = 3.0
"""Seconds that the last spans have to reach the collector when the server ends, if so many are left."""


def open_tracing(choice: TracesChoice) -> Tracing:
    """Traces that are exported. A collector that does not answer loses spans, beyond a bounded queue, and nothing else."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    default = {} if named else {"service.name": "jinfercept"}  # attributes of code take precedence over variables
    resource = Resource.create({"service.version": __version__} | default)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=choice.endpoint)))

    def close(timeout_s: float) -> None:
        thread = threading.Thread(target=provider.shutdown, name="jinfercept-traces", daemon=True)
        thread.start()
        thread.join(min(timeout_s, CLOSING_S))

    return Tracing(provider, close, texts=choice.texts)
