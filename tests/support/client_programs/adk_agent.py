"""An agent of Google's ADK, on LiteLLM. Arguments: the provider in front of the model's name, and whether to stream."""

# pyright: reportMissingImports=false
import asyncio
import os
import sys
from typing import Any

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from price_tools import BRIEF, QUESTIONS, price, report
from price_tools import stock as failing


def stock(item: str) -> dict[str, Any]:
    """How many there are."""
    try:
        return {"number": failing(item)}
    except ValueError as error:
        return {"error": str(error)}


async def main(provider: str, how: str) -> None:
    model = LiteLlm(model=f"{provider}/{os.environ['MODEL']}")
    runner = InMemoryRunner(agent=Agent(name="clerk", model=model, instruction=BRIEF, tools=[price, stock]))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="me")
    mode = RunConfig(streaming_mode=StreamingMode.SSE if how == "stream" else StreamingMode.NONE)
    for question in QUESTIONS:
        content = types.Content(role="user", parts=[types.Part(text=question)])
        text, pieces = "", 0
        async for event in runner.run_async(user_id="me", session_id=session.id, new_message=content, run_config=mode):
            parts = (event.content.parts if event.content else None) or []
            if event.partial:
                pieces += 1
            else:
                text = "".join(part.text or "" for part in parts) or text
        report(text, pieces if how == "stream" else None)


asyncio.run(main(*sys.argv[1:]))
