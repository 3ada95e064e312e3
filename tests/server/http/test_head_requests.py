"""HEAD on every route that has GET: the head of its answer without the body."""

import pytest

from tests.support.live_server import END, Running, until
from tests.support.responses import answer, says
from tests.support.scripted_model import Scripted

PATHS = [
    "/",
    "/docs",
    "/openapi.json",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/live",
    "/v1/models",
    "/v1/models/x",
]


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses/none", "/v1/conversations/none", "/nothing"])
def test_head_is_answered_as_get_without_a_body(served: Running, path: str) -> None:
    head, got = served.http.head(path), served.http.get(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_of_a_route_without_get_is_405_and_allow_names_it_elsewhere(served: Running) -> None:
    refused = served.http.head("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert served.http.post("/health").headers["allow"] == "GET, HEAD"


def test_head_of_a_stream_ends_at_once_and_leaves_the_response(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    begun = answer(served, background=True, stream=True)
    name = next(iter(begun)).response.id
    head = served.http.head(f"/v1/responses/{name}", params={"stream": "true"})
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    begun.close()
    until(lambda: served.client.responses.retrieve(name).status == "completed")
