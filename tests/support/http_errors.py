"""Requests that a server takes, and the shape of its errors."""

from typing import Any

CHAT = "/v1/chat/completions"

JSON = {"content-type": "application/json"}

SHORT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {},
    "/detokenize": {},
}


def shape(answer: Any) -> tuple[int, Any]:
    """Status and code of an answer, whose body has to be an error object."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]
