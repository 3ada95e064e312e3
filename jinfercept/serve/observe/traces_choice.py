"""Whether traces are exported, and where to: by flags and by the standard `OTEL_*` variables. Imports no tracing library."""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jinfercept.errors import ConfigError

if TYPE_CHECKING:
    from jinfercept.serve.observe.traces import RequestTrace

log = logging.getLogger(__name__)

TRACE: "ContextVar[RequestTrace | None]" = ContextVar("jinfercept_trace", default=None)
"""The trace of the HTTP request that the current task serves; None while traces are off, and if it generates nothing."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def traces_endpoint(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """The URL of a collector's `/v1/traces`, "" if the exporter reads it from the environment; None: there are no traces.

    Variables without the packages are logged only: they may be meant for other processes.

    Raises:
        ConfigError: the flag's URL is wrong, or packages are missing for it.
    """
    if flag is None and not any(environ.get(name) for name in _ENDPOINTS):
        return None
    endpoint, is_installed = "" if flag is None else _checked(flag), _is_installed()
    if not is_installed and flag is not None:
        fix = "pip install 'jinfercept[otel]'"
        raise ConfigError("traces need more packages", got=f"--otlp-traces-endpoint {flag}", fix=fix)
    if not is_installed:
        log.warning("OTEL_* variables name a collector, and there are no traces; fix: pip install 'jinfercept[otel]'")
        return None
    return endpoint


def _is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _checked(endpoint: str) -> str:
    """The URL; one without a path gets that of OTLP. Raises `ConfigError`."""
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        url, is_url = urlsplit(""), False
    if not is_url:
        fix = "the URL of a collector that speaks OTLP over HTTP, such as http://127.0.0.1:4318"
        raise ConfigError("otlp_traces_endpoint is not a URL", got=endpoint, fix=fix)
    return url._replace(path="/v1/traces").geturl() if url.path in ("", "/") else endpoint
