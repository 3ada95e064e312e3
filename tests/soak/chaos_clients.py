"""Clients of a chaos: one compares tokens with quiet answers, one stores responses and continues them. See `chaos.py`."""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Protocol, final

import httpx2

from tests.soak.chaos_outcome import Outcome, Promise

NAMED = (
    *("replica_lost", "no_replica", "draining", "aborted", "queue_full", "engine_error"),
    *("state_unavailable", "server_lost"),
)
PROMPTS, TOKENS = 24, 64
PATIENCE_S = 120.0
"""Seconds after which a request counts as hung."""
_TURN = 24
_STORED_TOKENS = 12
_LONGEST_CHAIN = 6
_ENDS = ("completed", "incomplete", "failed", "cancelled")


class Served(Protocol):
    """A fleet that is killed and started again.

    Attributes:
        url: of the front.
        up: set while the front runs.
    """

    @property
    def url(self) -> str: ...
    @property
    def up(self) -> threading.Event: ...


class _Ended(Exception):
    """A request ended with this code of an error."""


class ChaosClient(threading.Thread, ABC):
    """One client: it asks, one request after the other, until `ended` is set."""

    def __init__(self, fleet: Served, outcome: Outcome, seed: str) -> None:
        super().__init__(daemon=True)
        self._fleet, self._outcome, self._rng = fleet, outcome, Random(seed)
        self.ended = threading.Event()

    def run(self) -> None:
        with httpx2.Client(base_url=self._fleet.url, timeout=PATIENCE_S) as http:
            while not self.ended.is_set():
                self._fleet.up.wait(1.0)
                if self._fleet.up.is_set():
                    self._guarded(http)

    def _guarded(self, http: httpx2.Client) -> None:
        """Ask, and count how it ended."""
        began_s = time.monotonic()
        try:
            ended = self.ask(http)
        except _Ended as error:
            ended = str(error)
            if ended not in NAMED:
                self._outcome.note(self._outcome.unnamed, ended)
        except httpx2.TimeoutException:
            ended = "hung"
        except httpx2.HTTPError as failure:
            if self._fleet.up.is_set() and self._settled():
                self._outcome.note(self._outcome.unnamed, f"{type(failure).__name__}: {failure}")
            ended = "connection closed with the front"
        self._outcome.count("hung" if time.monotonic() - began_s > 2 * PATIENCE_S else ended)

    @abstractmethod
    def ask(self, http: httpx2.Client) -> str:
        """One request; returns how it ended. Raises `_Ended` for an error."""

    def _settled(self) -> bool:
        """Whether the front still runs a moment later: it was not killed."""
        time.sleep(1.0)
        return self._fleet.up.is_set()


@final
class TokenClient(ChaosClient):
    """Greedy completions; a second turn begins with a part of the first answer.

    Args:
        expected: the tokens of every prompt's quiet answer.
    """

    def __init__(self, fleet: Served, outcome: Outcome, seed: str, expected: Sequence[Sequence[int]]) -> None:
        super().__init__(fleet, outcome, seed)
        self._expected = expected

    def ask(self, http: httpx2.Client) -> str:
        number, second, stream = self._rng.randrange(PROMPTS), self._rng.random() < 0.5, self._rng.random() < 0.5
        answer = self._expected[number]
        prompt, expected = [*prompt_of(number), *(answer[:_TURN] if second else ())], answer[_TURN * second :]
        body = request_of(prompt, len(expected)) | {"stream": stream}
        tokens, error = streamed(http, body) if stream else whole(http, body)
        if tokens != list(expected[: len(tokens)]) or (error is None and len(tokens) != len(expected)):
            message = f"prompt {number}, second={second}, stream={stream}: {tokens} for {expected}, {error}"
            self._outcome.note(self._outcome.wrong, message)
        if error is not None:
            raise _Ended(error)
        return "answered"


@final
class StoringClient(ChaosClient):
    """Stored responses, some in the background, some continued: what it saw of each is a `Promise` of the outcome."""

    def __init__(self, fleet: Served, outcome: Outcome, seed: str) -> None:
        super().__init__(fleet, outcome, seed)
        self._chain: list[str] = []

    def ask(self, http: httpx2.Client) -> str:
        body: dict[str, Any] = {
            "model": "tiny",
            "input": "".join(self._rng.choices("abcdefgh ", k=20)),
            "max_output_tokens": _STORED_TOKENS,
            "temperature": 0,
        }
        if self._chain:
            body["previous_response_id"] = self._chain[-1]
        kind = self._rng.choice(("whole", "stream", "background"))
        if kind == "whole":
            response = _json(http.post("/v1/responses", json=body))
        elif kind == "stream":
            response = self._streamed(http, body)
        else:
            response = self._background(http, body)
        if response["status"] == "failed":
            self._outcome.promise(Promise(response["id"], None))
            raise _Ended(str((response["error"] or {}).get("code")))
        self._outcome.promise(Promise(response["id"], text_of(response)))
        self._chain = [*self._chain, response["id"]] if len(self._chain) < _LONGEST_CHAIN else []
        return f"stored, {kind}"

    def _streamed(self, http: httpx2.Client, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response of a stream's last event."""
        with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise _Ended(_code(json.loads(answer.read())))
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if event["type"] == "error":
                    raise _Ended(_code(event) if "error" in event else str(event["code"]))
                if event["type"] == "response.created":
                    self._outcome.promise(Promise(event["response"]["id"], None))
                if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                    return event["response"]
        raise _Ended("a stream without an end")

    def _background(self, http: httpx2.Client, body: Mapping[str, Any]) -> dict[str, Any]:
        """A response in the background, once it has ended. Errors of a poll are counted, and it is asked again."""
        response = _json(http.post("/v1/responses", json={**body, "background": True}))
        self._outcome.promise(Promise(response["id"], None))
        deadline_s = time.monotonic() + PATIENCE_S
        while response["status"] not in _ENDS and time.monotonic() < deadline_s:
            time.sleep(0.2)
            try:
                response = _json(http.get(f"/v1/responses/{response['id']}"))
            except _Ended as error:
                if str(error) not in NAMED:
                    raise
                self._outcome.count(f"poll: {error}")
        if response["status"] not in _ENDS:
            raise httpx2.ReadTimeout("a response in the background did not end")
        return response


def prompt_of(number: int) -> list[int]:
    """A prompt in tokens of the tiny model."""
    rng = Random(number)
    return [rng.randrange(64, 90) for _ in range(80)]


def request_of(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """The body of a greedy completion."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def whole(http: httpx2.Client, body: dict[str, Any]) -> tuple[list[int], str | None]:
    """Tokens of an answer, and the code of its error."""
    answer = http.post("/v1/completions", json=body)
    data = answer.json()
    if answer.status_code != 200:
        return [], _code(data)
    return data["choices"][0]["token_ids"], None


def streamed(http: httpx2.Client, body: dict[str, Any]) -> tuple[list[int], str | None]:
    """As `whole`, of a stream."""
    tokens = list[int]()
    with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return [], _code(json.loads(answer.read()))
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                return tokens, _code(data)
            tokens += data["choices"][0].get("token_ids") or []
    return tokens, None


def check_promises(url: str, outcome: Outcome) -> None:
    """Fetch every response that a client has seen: it is there, as it was seen, or it has failed by name before its end."""
    with httpx2.Client(base_url=url, timeout=PATIENCE_S) as http:
        for promise in outcome.promises.values():
            answer = http.get(f"/v1/responses/{promise.id}")
            if answer.status_code != 200:
                outcome.note(outcome.lost, f"{promise}: HTTP {answer.status_code} {answer.text}")
                continue
            response = answer.json()
            if promise.text is not None:
                if text_of(response) != promise.text:
                    outcome.note(outcome.lost, f"{promise} is now {response['status']}: {text_of(response)!r}")
            elif response["status"] not in _ENDS:
                outcome.note(outcome.lost, f"{promise} is still {response['status']}")
            elif response["status"] == "failed" and response["error"]["code"] not in NAMED:
                outcome.note(outcome.unnamed, f"{promise} has failed: {response['error']}")


def text_of(response: Mapping[str, Any]) -> str:
    """The text of a response."""
    parts = (part for item in response["output"] if item["type"] == "message" for part in item["content"])
    return "".join(part["text"] for part in parts)


def _json(answer: httpx2.Response) -> dict[str, Any]:
    try:
        data = answer.json()
    except ValueError:
        raise _Ended(f"HTTP {answer.status_code} {answer.headers}: {answer.text[:100]!r}") from None
    if answer.status_code != 200:
        raise _Ended(_code(data))
    return data


def _code(data: Mapping[str, Any]) -> str:
    error = data["error"]
    return str(error["code"]) if error.get("code") in NAMED else str(error)
