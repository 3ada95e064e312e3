"""An HTTP request between a front and a replica: the plain parts of its ASGI scope and its whole body."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import Scope

SERVER = ("replica", 0)


class HttpCall(NamedTuple):
    """A request.

    Attributes:
        method, path, raw_path, query: of its first line; the path is decoded.
        headers: names in lower case, and values.
        client: address and port of the client; None: unknown.
        scheme, http_version: of the connection to the front.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    scheme: str
    http_version: str
    body: bytes = b""

    @classmethod
    def of(cls, scope: Scope, body: bytes = b"", more: Mapping[str, str] | None = None) -> "HttpCall":
        """The request of an ASGI scope, with `more` headers in place of those of the same names.

        Args:
            body: decoded, so that the request has no `content-encoding`.
        """
        added = [(name.encode(), value.encode("latin-1")) for name, value in (more or {}).items()]
        replaced = {b"content-encoding", *(name for name, _ in added)}
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"] if name not in replaced]
        client = scope.get("client")
        return cls(
            scope["method"],
            scope["path"],
            scope.get("raw_path") or scope["path"].encode(),
            scope["query_string"],
            (*headers, *added),
            client and (client[0], client[1]),
            scope.get("scheme", "http"),
            scope.get("http_version", "1.1"),
            body,
        )

    def scope(self) -> dict[str, Any]:
        """A new ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": SERVER,
            "state": {},
        }


class HttpReply(NamedTuple):
    """A whole response of a replica.

    Attributes:
        headers: names in lower case, and values.
    """

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ReplicaLostError(Exception):
    """A replica ended while it worked on a request."""
