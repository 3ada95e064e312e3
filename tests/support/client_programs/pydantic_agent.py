"""Pydantic AI's agent. Arguments: the API, and whether to stream."""

# pyright: reportMissingImports=false
import asyncio
import os
import sys
from typing import Any

from price_tools import BRIEF, QUESTIONS, price, report, stock
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

APIS: dict[str, Any] = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


def failing(item: str) -> str:
    """How many there are."""
    try:
        return str(stock(item))
    except Exception as error:
        raise ModelRetry(str(error)) from error


async def main(api: str, how: str) -> None:
    agent = Agent(APIS[api](os.environ["MODEL"]), instructions=BRIEF)
    agent.tool_plain(price)
    agent.tool_plain(name="stock", retries=3)(failing)
    history: list[Any] = []
    for question in QUESTIONS:
        pieces = None
        if how == "stream":
            async with agent.run_stream(question, message_history=history) as result:
                parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
            text, pieces = "".join(parts), len(parts)
        else:
            result: Any = await agent.run(question, message_history=history)
            text = result.output
        report(text, pieces)
        history = result.all_messages()


asyncio.run(main(*sys.argv[1:]))
