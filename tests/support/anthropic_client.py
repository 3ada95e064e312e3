"""`/v1/messages` for tests: a tool, a question, and Anthropic's client."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anthropic import Anthropic

from tests.support.live_server import MODEL, Running
from tests.support.responses import QUESTION, SCHEMA

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
PRICE: Any = {"name": "price", "description": "The price of an item.", "input_schema": SCHEMA}
MESSAGES = "/v1/messages"


@contextmanager
def anthropic(server: Running, key: str = "none") -> Iterator[Any]:
    """Anthropic's client of a server."""
    with Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


def create(server: Running, messages: Any = ASKED, *, key: str = "none", **fields: Any) -> Any:
    """A message, without chance."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 200, "extra_body": {"temperature": 0}}
    with anthropic(server, key) as client:
        return client.messages.create(**(body | fields))


def streamed(server: Running, messages: Any = ASKED, **fields: Any) -> tuple[list[Any], Any]:
    """Raw events, and the message that Anthropic's client makes of them."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 200, "extra_body": {"temperature": 0}}
    with anthropic(server) as client, client.messages.stream(**(body | fields)) as stream:
        events = [event for event in stream if event.type not in ("text", "input_json", "thinking", "signature")]
        return events, stream.get_final_message()


def post(server: Running, path: str = MESSAGES, **fields: Any) -> Any:
    """A raw request."""
    return server.http.post(path, json={"messages": ASKED, "max_tokens": 8, "temperature": 0} | fields)


def failed(answer: Any) -> tuple[int, str, str]:
    """Status, type and message of an error of Anthropic's protocol."""
    body = answer.json()
    assert (set(body), set(body["error"])) == ({"type", "error", "request_id"}, {"type", "message"})
    assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
    return answer.status_code, body["error"]["type"], body["error"]["message"]
