"""An agent of Strands. Arguments: the API, and whether to stream."""

# pyright: reportMissingImports=false
import asyncio
import os
import sys
from typing import Any

import strands
from price_tools import BRIEF, QUESTIONS, price, report, stock
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

APIS: dict[str, Any] = {"chat": OpenAIModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


async def main(api: str, how: str) -> None:
    limit = {"max_tokens": 500} if api == "messages" else {}
    model = APIS[api](model_id=os.environ["MODEL"], **limit)
    tools = [strands.tool(price), strands.tool(stock)]
    agent = strands.Agent(model=model, tools=tools, system_prompt=BRIEF, callback_handler=None)
    for question in QUESTIONS:
        events = [event async for event in agent.stream_async(question)]
        pieces = sum("data" in event for event in events) if how == "stream" else None
        report(str(events[-1]["result"]).strip(), pieces)


asyncio.run(main(*sys.argv[1:]))
