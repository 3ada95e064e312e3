"""The model as an MCP server, driven by the SDK's client: answers, tasks, keys, hosts, limits and the drain."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.support.chat_templates import QWEN
from tests.support.gate import closed_gate
from tests.support.live_server import END, Running, prompt_of, running
from tests.support.scripted_model import Make, Scripted

QUESTION = {"role": "user", "content": "How much is a lamp?"}
ANSWER = "It costs 23."
LIMITS: dict[str, Any] = {"max_background_responses": 2, "max_prompt_chars": 2000, "max_body_size": 50_000}


@pytest.fixture
def mcp(make_scripted: Make) -> Iterator[tuple[Scripted, Running]]:
    """A server with two keys; afterwards its engine has to be idle."""
    scripted = make_scripted(QWEN)
    with running(scripted.llm, mcp=True, api_key=("first", "second"), **LIMITS) as server:
        yield scripted, server
        server.wait_idle()


@asynccontextmanager
async def client(server: Running, key: str, mode: Any = "auto") -> AsyncGenerator[Client]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{server.url}/mcp", http_client=http), mode=mode) as connected,
    ):
        yield connected


def use[T](server: Running, key: str, work: Callable[[Client], Awaitable[T]], mode: Any = "auto") -> T:
    async def run() -> T:
        async with client(server, key, mode) as connected:
            return await work(connected)

    return asyncio.run(run())


def called(server: Running, key: str, name: str, **arguments: Any) -> Any:
    return use(server, key, lambda connected: connected.call_tool(name, arguments))


def follow(scripted: Scripted) -> None:
    scripted.follow(prompt_of(scripted, [QUESTION]) + ANSWER + END)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_model_answers_and_works_on_tasks(mcp: tuple[Scripted, Running], mode: str) -> None:
    scripted, server = mcp
    follow(scripted)

    async def work(connected: Client) -> tuple[list[str], Any, Any]:
        tools = [tool.name for tool in (await connected.list_tools()).tools]
        answer = await connected.call_tool("ask", {"prompt": QUESTION["content"]})
        task = await connected.call_tool("start_task", {"prompt": QUESTION["content"]})
        assert task.structured_content is not None
        arguments = {"task_id": task.structured_content["id"], "wait_s": 30}
        return tools, answer.content[0], (await connected.call_tool("task_answer", arguments)).structured_content

    tools, answer, task = use(server, "first", work, mode)
    assert tools == ["ask", "start_task", "task_answer"]
    assert answer.text == ANSWER
    assert (task["status"], task["answer"]) == ("completed", ANSWER)
    server.wait_idle()


def test_a_task_belongs_to_the_key_that_began_it(mcp: tuple[Scripted, Running]) -> None:
    scripted, server = mcp
    scripted.follow()
    with closed_gate(scripted.llm):
        long = {"prompt": "a", "max_tokens": 60}
        ids = [called(server, "first", "start_task", **long).structured_content["id"] for _ in range(2)]
        third = called(server, "first", "start_task", **long)
        assert (third.is_error, "may have 2 responses" in third.content[0].text) == (True, True)
        [own, foreign, unknown] = [
            called(server, key, "task_answer", task_id=name)
            for key, name in (("first", ids[0]), ("second", ids[0]), ("second", "resp_0"))
        ]
        assert own.structured_content["status"] in ("queued", "in_progress")
        assert foreign.is_error
        assert foreign.content[0].text.replace(ids[0], "resp_0") == unknown.content[0].text
        assert called(server, "second", "start_task", **long).structured_content["status"] == "queued"


def test_what_has_no_key_or_is_too_large_is_refused_before_it_is_read(mcp: tuple[Scripted, Running]) -> None:
    scripted, server = mcp
    scripted.follow()
    headers = {"Accept": "application/json, text/event-stream"}
    key = {"Authorization": "Bearer first"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    assert server.http.post("/mcp", json=message, headers=headers).status_code == 401
    assert (
        server.http.post("/mcp", json=message, headers=headers | {"Authorization": "Bearer third"}).status_code == 401
    )
    assert server.http.get("/mcp", headers=headers | key).status_code == 405
    assert server.http.post("/mcp", json=message, headers=headers | key).status_code == 200
    large = server.http.post("/mcp", json=message | {"params": {"a": "b" * 60_000}}, headers=headers | key)
    assert large.status_code == 413
    many = server.http.post("/mcp", json=message | {"params": {"a": 9_000 * [{}]}}, headers=headers | key)
    assert (many.status_code, "too many values" in many.json()["error"]["message"]) == (400, True)
    assert server.http.post("/mcp", content=b"{", headers=headers | key).status_code == 415
    kind = {"Content-Type": "application/json"}
    assert server.http.post("/mcp", content=b"{", headers=headers | key | kind).status_code == 400
    for arguments, message in (
        ({}, "prompt: Field required"),
        ({"prompt": 3}, "prompt: Input should be a valid string (got 3)"),
        ({"prompt": "a" * 3000}, "characters"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1 (got 0)"),
        ({"prompt": "a", "max_token": 9}, "max_token: Extra inputs are not permitted (got 9)"),
    ):
        refused = called(server, "first", "ask", **arguments)
        assert (refused.is_error, message in refused.content[0].text) == (True, True)
        assert "pydantic" not in refused.content[0].text
    assert called(server, "first", "task_answer", task_id="resp_0", wait_s=1e9).is_error


def test_an_answer_that_is_cut_off_says_so(mcp: tuple[Scripted, Running]) -> None:
    scripted, server = mcp
    follow(scripted)
    answer = called(server, "first", "ask", prompt=QUESTION["content"], max_tokens=4)
    assert [part.text for part in answer.content] == [ANSWER[:4], "[cut off at max_tokens]"]
    tools = use(server, "first", lambda connected: connected.list_tools()).tools
    assert tools[0].input_schema["properties"]["max_tokens"]["default"] == 2048


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_that_leaves_ends_its_answer(mcp: tuple[Scripted, Running], mode: str) -> None:
    scripted, server = mcp
    scripted.follow()

    async def leave(connected: Client) -> None:
        asking = asyncio.ensure_future(connected.call_tool("ask", {"prompt": "a"}))
        while not server.llm.engine.thread.busy:
            await asyncio.sleep(0)
        asking.cancel()

    with closed_gate(scripted.llm):
        use(server, "first", leave, mode)
        server.wait_idle()


def test_a_drain_refuses_tasks_and_ends_those_that_run(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    scripted.follow()

    async def drain(connected: Client) -> tuple[Any, Any]:
        task = (await connected.call_tool("start_task", {"prompt": "a"})).structured_content
        assert task is not None
        server.server.handle_exit(signal.SIGTERM, None)
        while not server.service.draining:
            await asyncio.sleep(0)
        refused = await connected.call_tool("start_task", {"prompt": "a"})
        waited = await connected.call_tool("task_answer", {"task_id": task["id"], "wait_s": 30})
        return refused.content[0], waited.content[0]

    with closed_gate(scripted.llm), running(scripted.llm, mcp=True, drain_timeout=0.2) as server:
        refused, waited = use(server, "none", drain)
        assert "the server is shutting down" in refused.text
        assert "aborted" in waited.text


def test_no_stream_of_changes_is_offered(mcp: tuple[Scripted, Running]) -> None:
    _, server = mcp
    version = "2026-07-28"
    names = "io.modelcontextprotocol/"
    meta = {f"{names}protocolVersion": version, f"{names}clientCapabilities": {}}
    method = "subscriptions/listen"
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": meta, "notifications": {}}}
    headers = {
        "Authorization": "Bearer first",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": version,
        "Mcp-Method": method,
    }
    assert server.http.post("/mcp", json=message, headers=headers).status_code == 404


def test_without_keys_web_pages_of_other_hosts_do_not_reach_the_model(make_scripted: Make) -> None:
    with running(make_scripted(QWEN).llm, mcp=True) as server:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert server.http.post("/mcp", json=message, headers={"Host": "evil.example"}).status_code == 421
        assert server.http.post("/mcp", content=b"{}", headers={"Origin": "http://evil.example"}).status_code == 403
    with running(make_scripted(QWEN).llm) as server:
        assert server.http.post("/mcp", json={}).status_code == 404
