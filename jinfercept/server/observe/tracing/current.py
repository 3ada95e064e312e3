"""The trace of the HTTP request that the current task serves. Imports no tracing library."""

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinfercept.server.observe.tracing.request_trace import RequestTrace

TRACE: "ContextVar[RequestTrace | None]" = ContextVar("jinfercept_trace", default=None)
"""None while traces are off, and in requests that generate nothing."""
