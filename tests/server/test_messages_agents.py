"""Anthropic's Claude Agent SDK, with the command-line program that it brings along, on `/v1/messages`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfercept.server import messages
from jinfercept.server.messages_protocol import MessagesBody
from tests.support.chat_templates import QWEN
from tests.support.live_server import END, MODEL, Running, running
from tests.support.responses import CALL, QUESTION
from tests.support.scripted_model import Scripted, scripted_llm

ANSWER = "It costs 23."
PROGRAM_CALL = CALL.replace("price", "mcp__shop__price")
LENGTH = 16384
"""The program's prompts have thousands of bytes, each of which is a token of the scripted model."""


@pytest.fixture
def long() -> Iterator[tuple[Scripted, Running]]:
    """A server whose model has a long context."""
    with scripted_llm(LENGTH) as make:
        scripted = make(QWEN)
        with running(scripted.llm, max_prompt_chars=100_000) as server:
            yield scripted, server
            server.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_calls_its_tool_and_the_result_finds_the_context(
    long: tuple[Scripted, Running], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sdk = pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed")
    scripted, server = long
    streams: list[str] = []
    asked: list[str] = []
    make_message_chat = messages.make_message_chat

    def scripting(service: Any, body: MessagesBody, *rest: Any) -> Any:
        """Writes the script, since only the program knows its prompts."""
        made = make_message_chat(service, body, *rest)
        chats, *_ = made
        [request] = chats.requests
        assert request.prompt is not None
        streams.append(request.prompt + (ANSWER if streams else PROGRAM_CALL) + END)
        scripted.follow(*streams)
        return made

    monkeypatch.setattr(messages, "make_message_chat", scripting)

    @sdk.tool("price", "The price of an item.", {"item": str})
    async def price(arguments: dict[str, Any]) -> dict[str, Any]:
        asked.append(arguments["item"])
        return {"content": [{"type": "text", "text": "23"}]}

    options = sdk.ClaudeAgentOptions(
        system_prompt="Be brief.",
        model=MODEL,
        mcp_servers={"shop": sdk.create_sdk_mcp_server("shop", tools=[price])},
        allowed_tools=["mcp__shop__price"],
        tools=[],
        max_turns=3,
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
    assert (last.subtype, last.result, last.num_turns) == ("success", ANSWER, 2)
    assert asked == ["lamp"]
    context, whole = (len(scripted.tokenizer.encode(stream)) for stream in streams)
    assert context - 1 <= last.usage["cache_read_input_tokens"] < whole
