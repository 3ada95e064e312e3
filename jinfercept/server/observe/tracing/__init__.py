"""OpenTelemetry traces of requests: whether they are wanted, the trace of a request, its spans, their export.

Only `export`, `request_trace` and `spans` import `opentelemetry`, and only they are imported when traces are on.
"""
