"""The middleware that a server's application and a fleet's front share: access log, check of hosts, CORS, answers to HEAD."""

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jinfercept.server.http.access_log import AccessLog, RequestCounter
from jinfercept.server.http.head_requests import HeadRequests
from jinfercept.server.http.host_check import HostCheck
from jinfercept.server.options import ServerOptions

_NAMES = ("x-request-id", "request-id")


def add_middleware(app: FastAPI, options: ServerOptions, counter: RequestCounter, shown: Sequence[str] = ()) -> None:
    """Log and count all requests of an application, refuse those for other hosts, let web pages of allowed origins use it, and
    answer HEAD as GET.

    Args:
        app: the application.
        options: of the server.
        counter: counts the requests in progress.
        shown: further headers of responses that web pages may read.
    """
    app.add_middleware(HeadRequests)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=[*_NAMES, *shown],
        )
    if (hosts := options.hosts()) is not None:
        app.add_middleware(HostCheck, hosts=hosts, origins=options.allowed_origins)
    app.add_middleware(AccessLog, service=counter)
