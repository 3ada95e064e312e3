"""The front of a fleet with replicas in this process, and what a replica does for it."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, final

import httpx2
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.replica_app import ReplicaApp
from jinfercept.fleet.replicas import HttpCall, Messages, ReplicaLostError, Replicas, Ticket
from jinfercept.fleet.routing import NoReplicaError
from jinfercept.llm import LLM
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.serve import DrainingServer, listen
from jinfercept.serve.server_tools import ServerTools
from jinfercept.serve.service import Service
from tests.support.chat_templates import QWEN
from tests.support.engine_state import engine_state
from tests.support.gate import Gate, closed_gate
from tests.support.live_server import MODEL, until
from tests.support.scripted_model import Make, Scripted

SECRET = bytes(range(32))


@final
class LocalReplicas:
    """See `Replicas`.

    Attributes:
        apps: by name; those that were removed do not run any more.
        hanging: names of replicas that take requests and do nothing.
        hung: requests that these took.
        dies_after: messages of an answer after which the next replica that answers is killed; None: none.
        num_looks: calls of `ask`.
    """

    def __init__(self, apps: dict[str, ReplicaApp]) -> None:
        self.apps = apps
        self.hanging: set[str] = set()
        self.hung = 0
        self.dies_after: int | None = None
        self.num_looks = 0

    async def _app(self, ticket: Ticket) -> ReplicaApp:
        reports = {name: await app.report() for name, app in self.apps.items()}
        if not reports:
            raise NoReplicaError("no replica runs")
        name = ticket.choose(reports)
        ticket.taken(name)
        return self.apps[name]

    async def answer(self, call: HttpCall, ticket: Ticket) -> AsyncGenerator[Messages]:
        """See `Replicas`."""
        app = await self._app(ticket)
        if app.name in self.hanging:
            self.hung += 1
            await asyncio.Event().wait()
        answer = app.answer(call)
        passed = 0
        try:
            async for messages in answer:
                if not messages:
                    yield messages
                for message in messages:
                    if self.dies_after is not None and passed >= self.dies_after:
                        self.dies_after = None
                        self.apps.pop(app.name)
                        raise ReplicaLostError(app.name)
                    passed += 1
                    yield (message,)
        finally:
            await answer.aclose()

    async def ask(self, method: str, ticket: Ticket, *arguments: Any) -> Any:
        """See `Replicas`."""
        self.num_looks += 1
        return await getattr(await self._app(ticket), method)(*arguments)


@dataclass(frozen=True)
class LocalFleet:
    """A fleet that runs.

    Attributes:
        url: of the front, without a path.
        http, client: for it.
        names: of all replicas, killed ones too.
    """

    url: str
    front: FleetFront
    replicas: LocalReplicas
    server: DrainingServer
    http: httpx2.Client
    client: OpenAI
    names: Sequence[str] = field(default=())

    def chat(self, *texts: str, **fields: Any) -> httpx2.Response:
        """A conversation whose texts alternate between a user and an assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts or ("Hi",))]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0} | fields
        return self.http.post("/v1/chat/completions", json=body)


@contextmanager
def local_fleet(
    llms: Sequence[LLM], make_tools: Callable[[], ServerTools] = ServerTools, **options: Any
) -> Iterator[LocalFleet]:
    """Serve models as replicas `a`, `b`, … of one fleet."""
    settings = ServerOptions(**({"port": 0, "served_model_name": (MODEL,), "drain_timeout": 2.0} | options))
    apps = {
        name: ReplicaApp(name, Service(llm, "tiny", settings, make_tools()), SECRET)
        for name, llm in zip("abcd", llms, strict=False)
    }
    replicas = LocalReplicas(dict(apps))
    fresh = list(apps.values())

    async def connect() -> Replicas:
        await asyncio.gather(*(app.start() for app in fresh))
        fresh.clear()
        return replicas

    async def end() -> None:
        await asyncio.gather(*(app.close(0.0) for app in apps.values()))

    front = FleetFront(connect, settings, "tiny", begin_s=60.0)
    listener, url = listen(settings)
    server = DrainingServer(create_front(front, fan_out_router(front), end=end), front, listener)
    thread = threading.Thread(target=server.serve_until_signal)
    thread.start()
    until(lambda: server.started)
    key = (*settings.api_key, *settings.operator_key, "none")[0]
    headers = {"authorization": f"Bearer {key}"} if key != "none" else {}
    try:
        with (
            OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client,
            httpx2.Client(base_url=url, timeout=60, headers=headers) as http,
        ):
            yield LocalFleet(url, front, replicas, server, http, client, tuple(apps))
    finally:
        if not front.draining:
            server.handle_exit(signal.SIGTERM, None)
        thread.join()


LONG: Any = {"max_tokens": 1900, "ignore_eos": True}


@pytest.fixture
def scripted(make_scripted: Make) -> Scripted:
    made = make_scripted(QWEN)
    made.follow()
    return made


@pytest.fixture
def gate(scripted: Scripted) -> Iterator[Gate]:
    """Keeps the model's long answers from their ends until the test opens it."""
    with closed_gate(scripted.llm) as gate:
        yield gate


@pytest.fixture
def fleet(scripted: Scripted) -> Iterator[LocalFleet]:
    with local_fleet([scripted.llm, scripted.llm]) as local:
        yield local


def test_a_conversation_without_any_key_stays_at_its_replica(fleet: LocalFleet) -> None:
    for number in range(4):
        texts = [f"Question {number}, which is about something of its own."]
        seen = list[tuple[str, str]]()
        for _ in range(3):
            answer = fleet.chat(*texts)
            assert answer.status_code == 200, answer.text
            seen.append((answer.headers["x-jinfercept-replica"], answer.headers["x-jinfercept-route"]))
            texts += [answer.json()["choices"][0]["message"]["content"], "Go on."]
        assert len({name for name, _ in seen}) == 1
        assert [why for _, why in seen[1:]] == ["conversation"] * 2
    assert {name for name, _ in fleet.front.routes.totals.routed} == {"a", "b"}


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "data: [DONE]"),
        ("/v1/completions", {"prompt": "Hi"}, "data: [DONE]"),
        ("/v1/responses", {"input": "Hi"}, "event: error"),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_an_error_by_name(
    fleet: LocalFleet, path: str, body: dict[str, Any], event: str
) -> None:
    fleet.replicas.dies_after = 6
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = fleet.http.post(path, json=body | {"stream": True, limit: 40, "ignore_eos": True})
    assert answer.status_code == 200
    assert event in answer.text
    assert '"code":"replica_lost"' in answer.text.split("\n\n", 5)[-1]
    if path == "/v1/responses":
        numbers = [json.loads(line[6:])["sequence_number"] for line in answer.text.splitlines() if line[:6] == "data: "]
        assert numbers == list(range(len(numbers)))
    assert len(fleet.replicas.apps) == 1
    again = fleet.http.post(path, json=body | {limit: 4})
    assert again.status_code == 200
    assert fleet.front.routes.totals.lost == 0  # nothing to be sent again


def test_an_encoded_body_is_refused_by_the_front_and_head_is_get(fleet: LocalFleet) -> None:
    headers = {"content-type": "application/json", "content-encoding": "br"}
    refused = fleet.http.post("/v1/completions", content=b"{}", headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (415, "invalid_request_error")
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/responses/none"):
        head = fleet.http.head(path)
        assert (head.status_code, head.content) == (fleet.http.get(path).status_code, b"")


def test_an_answer_that_has_not_begun_is_made_by_another_replica(fleet: LocalFleet) -> None:
    fleet.replicas.dies_after = 0
    answer = fleet.chat("Hi")
    assert answer.status_code == 200
    assert answer.headers["x-jinfercept-replica"] in fleet.replicas.apps
    assert (fleet.front.routes.totals.lost, fleet.front.routes.totals.retried) == (1, 1)


def test_a_replica_that_hangs_is_passed_over(fleet: LocalFleet) -> None:
    fleet.replicas.hanging, fleet.front._begin_s = {"a"}, 1.0
    questions = map("A question of its own, number {}".format, count())
    while not fleet.replicas.hung:
        assert fleet.chat(next(questions)).headers["x-jinfercept-replica"] == "b"
    fleet.replicas.hanging, fleet.front._begin_s = {"a", "b"}, 0.1
    assert fleet.chat("No replica answers").json()["error"]["code"] == "no_replica"


def test_the_last_replica_that_dies_gives_503_by_name(scripted: Scripted) -> None:
    with local_fleet([scripted.llm]) as fleet:
        fleet.replicas.dies_after = 0
        lost = fleet.chat("Hi")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "no_replica")
        assert lost.headers["retry-after"]
        assert fleet.http.get("/health").status_code == 503


@pytest.mark.usefixtures("gate")
def test_a_client_that_leaves_frees_its_pages(fleet: LocalFleet, scripted: Scripted) -> None:
    stream = fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        max_tokens=1900,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert engine_state(scripted.llm).has_work
    stream.close()
    until(lambda: not engine_state(scripted.llm).has_work)


@pytest.mark.usefixtures("gate")
def test_a_drain_finishes_what_runs_and_refuses_what_is_new(scripted: Scripted) -> None:
    with local_fleet([scripted.llm, scripted.llm], drain_timeout=0.0) as fleet:
        body = {"prompt": "Hi", "stream": True, **LONG}
        with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            fleet.server.handle_exit(2, None)
            rest = list(lines)
        assert any("aborted" in line for line in rest), rest[-3:]
        assert rest[-2] == "data: [DONE]"
    assert not engine_state(scripted.llm).has_work


def test_keys_and_limits_are_checked_before_a_replica_is_asked(scripted: Scripted) -> None:
    with local_fleet([scripted.llm], api_key=("one", "two"), max_body_size=2000) as fleet:
        fleet.replicas.apps.clear()
        anonymous = {"authorization": ""}
        for method, path in (("POST", "/v1/completions"), ("GET", "/inbox"), ("GET", "/live"), ("GET", "/v1/models")):
            assert fleet.http.request(method, path, headers=anonymous).status_code == 401
        large = fleet.http.post("/v1/completions", json={"prompt": "x" * 3000})
        assert large.status_code == 413


def test_limits_of_keys_hold_over_all_replicas(scripted: Scripted, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[slow]\nkey = "slow"\nrequests_per_minute = 2\n[other]\nkey = "other"\n')
    with local_fleet([scripted.llm, scripted.llm], api_key_file=str(keys)) as fleet:
        slow, other = ({"authorization": f"Bearer {key}"} for key in ("slow", "other"))
        body = {"prompt": "Hi", "max_tokens": 2}
        answers = [fleet.http.post("/v1/completions", json=body, headers=slow) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert int(answers[2].headers["retry-after"]) >= 1
        messages = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        anthropic = httpx2.post(f"{fleet.url}/v1/messages", json=messages, headers={"x-api-key": "other"}, timeout=60)
        assert (anthropic.status_code, anthropic.json().get("type")) == (200, "message"), anthropic.text
        assert fleet.http.post("/v1/completions", json=body, headers=other).status_code == 200


def test_responses_in_the_background_count_until_their_own_end_at_all_replicas(
    scripted: Scripted, gate: Gate, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[two]\nkey = "two"\nmax_concurrent = 2\n[few]\nkey = "few"\ntokens_per_minute = 40\n')
    with local_fleet([scripted.llm, scripted.llm], api_key_file=str(keys)) as fleet:

        def ask(key: str, number: int, tokens: int) -> httpx2.Response:
            body = {"input": f"Question {number}", "background": True, "max_output_tokens": tokens, "ignore_eos": True}
            return fleet.http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})

        answers = [ask("two", number, 1900) for number in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
        assert answers[2].json()["error"]["code"] == "concurrency_limit_exceeded"
        for answer in answers[:2]:
            path = f"/v1/responses/{answer.json()['id']}/cancel"
            assert fleet.http.post(path, headers={"authorization": "Bearer two"}).json()["status"] == "cancelled"
        gate.open()
        until(lambda: ask("two", 4, 1).status_code == 200)
        assert ask("few", 0, 60).status_code == 200
        until(lambda: ask("few", 1, 60).status_code == 429)


def test_a_drain_lets_responses_in_the_background_end(scripted: Scripted, gate: Gate, tmp_path: Path) -> None:
    state = str(tmp_path / "state.db")
    with local_fleet([scripted.llm, scripted.llm], drain_timeout=60.0, state_url=state) as fleet:
        begun = fleet.client.responses.create(
            model=MODEL, input="Hi", background=True, max_output_tokens=200, extra_body={"ignore_eos": True}
        )
        assert any(begun.id in app.service.state.open for app in fleet.replicas.apps.values())
        fleet.server.handle_exit(2, None)
        gate.open()
        until(lambda: fleet.server.should_exit)  # a second signal would end the drain
    with local_fleet([scripted.llm], state_url=state) as fleet:
        ended = fleet.client.responses.retrieve(begun.id)
        assert (ended.status, ended.usage and ended.usage.output_tokens) == ("incomplete", 200)


def test_a_client_that_leaves_within_its_body_is_one_line_of_the_log(
    fleet: LocalFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = fleet.http.base_url
    with socket.create_connection((address.host, address.port or 80)) as leaving:
        leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
    until(lambda: "disconnected=true" in caplog.text.lower())
    assert "Traceback" not in caplog.text


def test_what_a_replica_answers_to_bad_requests_is_passed_on(fleet: LocalFleet) -> None:
    for content, status in ((b"{", 400), (b'{"prompt": "a", "max_tokens": -1}', 400), (b"[" * 5000, 400)):
        answer = fleet.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert fleet.http.post("/v1/completions", content=b"{}").status_code == 415
    assert fleet.http.get("/nothing").status_code == 404
    assert fleet.http.put("/v1/models").status_code == 405


def test_the_front_refuses_requests_for_other_hosts(fleet: LocalFleet) -> None:
    for path in ("/", "/health", "/ready", "/metrics", "/live", "/inbox", "/v1/models", "/nothing"):
        assert fleet.http.get(path, headers={"host": "evil.example"}).status_code == 421
        assert fleet.http.get(path, headers={"host": "localhost"}).status_code in (200, 404)


def test_a_response_is_found_at_the_replica_that_made_it(scripted: Scripted) -> None:
    with local_fleet([scripted.llm, scripted.llm], api_key=("one", "two")) as fleet:
        made = fleet.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4})
        name, at = made.json()["id"], made.headers["x-jinfercept-replica"]
        assert _as_another_key(fleet, name) == _as_another_key(fleet, f"resp_{'0' * 32}")
        for _ in range(3):
            shown = fleet.http.get(f"/v1/responses/{name}")
            assert (shown.status_code, shown.headers["x-jinfercept-replica"]) == (200, at)
        follow = {"input": "Go on", "previous_response_id": name, "max_output_tokens": 4}
        followed = fleet.http.post("/v1/responses", json=follow)
        assert (followed.status_code, followed.headers["x-jinfercept-replica"]) == (200, at)


def _as_another_key(fleet: LocalFleet, name: str) -> list[Any]:
    """What a key learns of a response that it has not made, and the looks that the front takes for it."""
    learned = list[Any]()
    follow = {"input": "Go on", "previous_response_id": name, "max_output_tokens": 4}
    for method, path, body in (
        ("GET", f"/v1/responses/{name}", None),
        ("GET", f"/v1/responses/{name}/input_items", None),
        ("POST", f"/v1/responses/{name}/cancel", None),
        ("DELETE", f"/v1/responses/{name}", None),
        ("POST", "/v1/responses", follow),
    ):
        before = fleet.replicas.num_looks
        answer = fleet.http.request(method, path, json=body, headers={"authorization": "Bearer two"})
        assert answer.status_code == 404
        headers = {key: value for key, value in answer.headers.items() if key not in ("date", "x-request-id")}
        del headers["x-jinfercept-replica"]  # by the load
        learned.append((answer.text.replace(name, "it"), headers, fleet.replicas.num_looks - before))
    return learned


def respond(connection: Any, text: str = "Hi", **fields: Any) -> Any:
    """The response to a text over a WebSocket, or the error."""
    connection.send({"type": "response.create", "input": text, "max_output_tokens": 4, "temperature": 0} | fields)
    while (event := connection.recv()).type not in ("response.incomplete", "error"):
        pass
    return event if event.type == "error" else event.response


def maker(local: LocalFleet, response_id: str) -> str:
    [(_, replica)] = [(name, at) for (_, name), at in local.front.routes._responses.items() if name == response_id]  # pyright: ignore[reportPrivateUsage]
    return replica


def test_metrics_have_a_label_for_the_replica(fleet: LocalFleet) -> None:
    for text in ("One", "Two", "Three"):
        fleet.chat(text)
    families = {family.name: family for family in text_string_to_metric_families(fleet.http.get("/metrics").text)}
    assert {sample.labels["replica"] for sample in families["vllm:prompt_tokens"].samples} == {"a", "b"}
    assert families["jinfercept:replicas"].samples[0].value == 2
    routed = families["jinfercept:routed_requests"].samples
    assert sum(sample.value for sample in routed) == 3, "questions of the front itself are not counted"
    assert fleet.http.get("/ready").json() == {"status": "ready", "replicas": 2}
    assert fleet.http.get("/health").json() == {"status": "ok", "replicas": 2}
    assert fleet.http.get("/live", params={"replica": "b"}).headers["x-jinfercept-replica"] == "b"
    assert fleet.http.get("/live", params={"replica": "z"}).status_code == 404


def test_openai_errors_have_the_code_of_a_lost_replica(scripted: Scripted) -> None:
    with local_fleet([scripted.llm, scripted.llm], tools=("none.toml",)) as fleet:
        fleet.replicas.dies_after = 0
        with pytest.raises(openai.InternalServerError) as lost:
            fleet.client.completions.create(model=MODEL, prompt="Hi", max_tokens=4)
        assert lost.value.code == "replica_lost"
        assert fleet.front.routes.totals.retried == 0  # its tools might run twice
