"""OpenAI's agents SDK on `/v1/responses`: it runs tools and sends their results."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import CALL
from tests.support.scripted_model import Scripted

QUESTION = "How much is a lamp?"


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_calls_its_tool_and_answers(served: Running, scripted: Scripted, stored: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    def price(item: str) -> str:
        asked.append(item)
        return "23"

    tool = agents.function_tool(price)
    declared: Any = {"name": "price", "description": tool.description, "parameters": tool.params_json_schema}
    declaration = {"type": "function", "function": declared | {"strict": tool.strict_json_schema}}
    chat: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    called = {"function": {"name": "price", "arguments": '{"item": "lamp"}'}, "type": "function", "id": "1"}
    after = [
        *chat,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "name": "price", "content": "23"},
    ]
    scripted.follow(
        prompt_of(scripted, chat, [declaration]) + CALL + END,
        prompt_of(scripted, after, [declaration]) + "It costs 23." + END,
    )

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
            settings = agents.ModelSettings(temperature=0, store=stored)
            agent = agents.Agent(
                name="clerk", instructions="Be brief.", model=model, tools=[tool], model_settings=settings
            )
            whole = await agents.Runner.run(agent, QUESTION, auto_previous_response_id=stored)
            streamed = agents.Runner.run_streamed(agent, QUESTION, auto_previous_response_id=stored)
            async for _ in streamed.stream_events():
                pass
            return whole, streamed

    whole, streamed = asyncio.run(run())
    assert (whole.final_output, streamed.final_output) == ("It costs 23.", "It costs 23.")
    assert asked == ["lamp", "lamp"]
    usage = whole.context_wrapper.usage
    assert usage.requests == 2
    assert usage.input_tokens_details.cached_tokens > 100
