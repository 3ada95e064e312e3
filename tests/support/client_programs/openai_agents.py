"""OpenAI's agents SDK. Arguments: the API, with what has the tools or keeps the conversation, and whether to stream."""

# pyright: reportMissingImports=false
import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import agents
from agents.mcp import MCPServerStdio
from price_tools import BRIEF, QUESTIONS, price, report, stock

SERVER = Path(__file__).with_name("price_server.py")


async def tools_of(api: str, stack: AsyncExitStack) -> dict[str, Any]:
    if api == "mcp":
        start: Any = {"command": sys.executable, "args": [str(SERVER)], "env": dict(os.environ)}
        server = MCPServerStdio(start, client_session_timeout_seconds=60)
        return {"mcp_servers": [await stack.enter_async_context(server)]}
    failing = agents.function_tool(stock, failure_error_function=lambda _, error: str(error))
    return {"tools": [agents.function_tool(price), failing]}


async def main(api: str, how: str) -> None:
    if api in ("chat", "mcp"):
        agents.set_default_openai_api("chat_completions")
    settings = agents.ModelSettings(store=api != "responses")
    session = agents.OpenAIConversationsSession() if api == "conversation" else None
    more: dict[str, Any] = {"auto_previous_response_id": True} if api == "stored" else {}
    history: list[Any] = []
    async with AsyncExitStack() as stack:
        tools = await tools_of(api, stack)
        agent = agents.Agent(name="clerk", instructions=BRIEF, model_settings=settings, **tools)
        for question in QUESTIONS:
            input_items: Any = [*history, {"role": "user", "content": question}]
            pieces = None
            if how == "stream":
                result: Any = agents.Runner.run_streamed(agent, input_items, session=session, **more)
                events = [event async for event in result.stream_events()]
                raw = [event.data.type for event in events if event.type == "raw_response_event"]
                pieces = raw.count("response.output_text.delta")
            else:
                result = await agents.Runner.run(agent, input_items, session=session, **more)
            report(result.final_output, pieces)
            if api == "stored":
                more |= {"previous_response_id": result.last_response_id}
            elif session is None:
                history = result.to_input_list()


asyncio.run(main(*sys.argv[1:]))
