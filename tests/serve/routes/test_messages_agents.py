"""Anthropic's Claude Agent SDK, with the command-line program that it brings along, on `/v1/messages`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfercept.serve.protocols.anthropic.schemas import MessagesBody
from jinfercept.serve.routes import messages
from tests.support.chat_templates import QWEN
from tests.support.live_server import END, MODEL, Running, running
from tests.support.responses import CALL, QUESTION
from tests.support.scripted_model import Scripted, scripted_llm

ANSWER = "It costs 23."
SEARCH = '<tool_call>\n{"name": "ToolSearch", "arguments": {"query": "select:mcp__shop__price"}}\n</tool_call>'
PROGRAM_CALL = CALL.replace("price", "mcp__shop__price")
LENGTH = 65536
"""The program's own prompt has 49,000 bytes, each of which is a token of the scripted model."""


@pytest.fixture
def long() -> Iterator[tuple[Scripted, Running]]:
    """A server whose model has a long context."""
    with scripted_llm(LENGTH) as make:
        scripted = make(QWEN)
        with running(scripted.llm, max_prompt_chars=1_000_000) as server:
            yield scripted, server
            server.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("turns", "settings"),
    [
        ((PROGRAM_CALL, ANSWER), {"system_prompt": "Be brief.", "tools": []}),
        ((SEARCH, PROGRAM_CALL, ANSWER), {"system_prompt": {"type": "preset", "preset": "claude_code"}}),
    ],
    ids=["own tool", "all tools"],
)
def test_an_agent_calls_its_tool_and_each_result_finds_the_context(
    long: tuple[Scripted, Running],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    turns: tuple[str, ...],
    settings: dict[str, Any],
) -> None:
    """Beside all tools of the program the own one is deferred, and has to be searched for."""
    sdk = pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed")
    scripted, server = long
    streams: list[str] = []
    questions: list[str] = []
    make_chat = messages.make_message_chat

    def scripting(service: Any, body: MessagesBody, *rest: Any) -> Any:
        """Writes the script, since only the program knows its prompts."""
        made = make_chat(service, body, *rest)
        chats, *_ = made
        [request] = chats
        assert request.prompt is not None
        streams.append(request.prompt + turns[len(streams)] + END)
        scripted.follow(*streams)
        return made

    monkeypatch.setattr(messages, "make_message_chat", scripting)

    @sdk.tool("price", "The price of an item.", {"item": str})
    async def price(arguments: dict[str, Any]) -> dict[str, Any]:
        questions.append(arguments["item"])
        return {"content": [{"type": "text", "text": "23"}]}

    options = sdk.ClaudeAgentOptions(
        **settings,
        model=MODEL,
        mcp_servers={"shop": sdk.create_sdk_mcp_server("shop", tools=[price])},
        allowed_tools=["mcp__shop__price"],
        max_turns=4,
        cwd=tmp_path,
        setting_sources=[],
        env={
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": str(tmp_path),
            "HOME": str(tmp_path),
        },
    )

    async def run() -> list[Any]:
        return [message async for message in sdk.query(prompt=QUESTION, options=options)]

    *_, last = asyncio.run(run())
    assert (last.subtype, last.result, last.num_turns) == ("success", ANSWER, len(turns))
    assert questions == ["lamp"]
    *contexts, _ = (len(scripted.tokenizer.encode(stream)) - 1 for stream in streams)
    assert last.usage["cache_read_input_tokens"] >= sum(contexts)
