"""Client libraries against the server: questions, streams, tool calls and structured outputs."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED, CALL, QUESTION
from tests.support.scripted_model import Scripted

SHOP = Path(__file__).parents[1] / "support" / "mcp_shop.py"
ANSWER = "It costs 23."


class Price(BaseModel):
    """What something costs."""

    item: str
    dollars: int
    kind: Literal["new", "used"]


PRICED = '{"item": "lamp", "dollars": 23, "kind": "new"}'


def called(arguments: str = '{"item": "lamp"}', id: str = "1") -> Any:
    call = {"function": {"name": "price", "arguments": arguments}, "type": "function", "id": id}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def returned(text: str, id: str = "1") -> Any:
    return {"role": "tool", "tool_call_id": id, "content": text}


def script(scripted: Scripted, tools: Any, messages: Any = ASKED, result: str = "23") -> None:
    """The model calls, and after the result it answers."""
    after = [*messages, called(), returned(result)]
    scripted.follow(prompt_of(scripted, messages, tools) + CALL + END, prompt_of(scripted, after, tools) + ANSWER + END)


# -- OpenAI's own helpers ------------------------------------------------------------------------------------------


def test_openai_parses_a_chat_into_a_class(served: Running, scripted: Scripted) -> None:
    scripted.follow(prompt_of(scripted, ASKED) + PRICED + END)
    chat: Any = {"model": MODEL, "messages": ASKED, "temperature": 0, "response_format": Price}
    message = served.client.chat.completions.parse(**chat).choices[0].message
    assert message.parsed == Price(item="lamp", dollars=23, kind="new")
    with served.client.chat.completions.stream(**chat) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == message.parsed
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_openai_parses_a_response_into_a_class(served: Running, scripted: Scripted) -> None:
    scripted.follow(prompt_of(scripted, ASKED) + PRICED + END)
    parsed = served.client.responses.parse(model=MODEL, input=QUESTION, temperature=0, text_format=Price)
    assert parsed.output_parsed == Price(item="lamp", dollars=23, kind="new")


def test_openai_parses_the_arguments_of_a_streamed_call(served: Running, scripted: Scripted) -> None:
    import openai

    class price(BaseModel):
        """The price of an item."""

        item: str

    tool = openai.pydantic_function_tool(price)
    scripted.follow(prompt_of(scripted, ASKED, [tool]) + CALL + END)
    messages: Any = ASKED
    with served.client.chat.completions.stream(model=MODEL, messages=messages, temperature=0, tools=[tool]) as stream:
        events = list(stream)
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done.parsed_arguments == price(item="lamp")


# -- LangChain -----------------------------------------------------------------------------------------------------


@pytest.fixture
def langchain(served: Running) -> Any:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return module.ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0)


@pytest.mark.slow
def test_langchain_asks_and_streams(langchain: Any, scripted: Scripted) -> None:
    scripted.follow(prompt_of(scripted, ASKED) + ANSWER + END)
    said = langchain.invoke(QUESTION)
    assert (said.content, said.response_metadata["finish_reason"]) == (ANSWER, "stop")
    assert said.usage_metadata["output_tokens"] == len(ANSWER) + 1
    pieces = list(langchain.stream(QUESTION))
    assert len(pieces) > 3
    assert "".join(piece.content for piece in pieces) == ANSWER


@pytest.mark.slow
def test_langchain_binds_tools_and_hands_their_results_in(langchain: Any, scripted: Scripted) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage  # pyright: ignore[reportMissingImports]
    from langchain_core.tools import StructuredTool  # pyright: ignore[reportMissingImports]
    from langchain_core.utils.function_calling import convert_to_openai_tool  # pyright: ignore[reportMissingImports]

    def quote(item: str) -> str:
        """The price of an item."""
        return "23"

    price: Any = StructuredTool.from_function(quote, name="price")
    script(scripted, [convert_to_openai_tool(price)])
    bound = langchain.bind_tools([price])
    asked = [HumanMessage(QUESTION)]
    said = bound.invoke(asked)
    [call] = said.tool_calls
    assert (call["name"], call["args"]) == ("price", {"item": "lamp"})
    results = [ToolMessage(price.invoke(call["args"]), tool_call_id=call["id"])]
    answer = bound.invoke([*asked, said, *results])
    assert answer.content == ANSWER
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 100
    merged: Any = None
    for piece in bound.stream(asked):
        merged = piece if merged is None else merged + piece
    assert [(one["name"], one["args"]) for one in merged.tool_calls] == [("price", {"item": "lamp"})]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(langchain: Any, scripted: Scripted, method: str) -> None:
    from langchain_core.utils.function_calling import convert_to_openai_tool  # pyright: ignore[reportMissingImports]

    if method == "json_schema":
        scripted.follow(prompt_of(scripted, ASKED) + PRICED + END)
    else:
        call = f'<tool_call>\n{{"name": "Price", "arguments": {PRICED}}}\n</tool_call>'
        scripted.follow(prompt_of(scripted, ASKED, [convert_to_openai_tool(Price)]) + call + END)
    structured = langchain.with_structured_output(Price, method=method)
    assert structured.invoke(QUESTION) == Price(item="lamp", dollars=23, kind="new")


# -- LiteLLM -------------------------------------------------------------------------------------------------------


@pytest.fixture
def litellm(served: Running) -> Iterator[Any]:
    module = pytest.importorskip("litellm", reason="litellm is not installed")
    module.suppress_debug_info = True

    def completion(**more: Any) -> Any:
        fields = {"api_base": f"{served.url}/v1", "api_key": "none", "temperature": 0, "messages": ASKED}
        return module.completion(f"openai/{MODEL}", **(fields | more))

    yield completion
    module.in_memory_llm_clients_cache.flush_cache()


@pytest.mark.slow
def test_litellm_asks_streams_and_calls_tools(litellm: Any, scripted: Scripted) -> None:
    from tests.support.responses import CHAT_PRICE

    scripted.follow(prompt_of(scripted, ASKED) + ANSWER + END)
    said = litellm()
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == (ANSWER, "stop")
    chunks = list(litellm(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == len(ANSWER) + 1

    script(scripted, [CHAT_PRICE])
    first = litellm(tools=[CHAT_PRICE]).choices[0].message
    [call] = first.tool_calls
    assert (call.function.name, call.function.arguments) == ("price", '{"item": "lamp"}')
    messages = [*ASKED, first, returned("23", call.id)]
    assert litellm(tools=[CHAT_PRICE], messages=messages).choices[0].message.content == ANSWER
    pieces = [
        one for chunk in litellm(tools=[CHAT_PRICE], stream=True) for one in (chunk.choices[0].delta.tool_calls or [])
    ]
    assert "".join(piece.function.arguments or "" for piece in pieces) == '{"item": "lamp"}'


# -- OpenAI's agents -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("source", ["function", "mcp"])
def test_an_agent_finds_its_tools_and_answers(served: Running, scripted: Scripted, kind: str, source: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    connect = pytest.importorskip("agents.mcp", reason="openai-agents is not installed").MCPServerStdio
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def price(item: str) -> str:
        """The price of an item."""
        return "23"

    async def run() -> tuple[Any, Any]:
        async with (
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
            connect({"command": sys.executable, "args": [str(SHOP)]}, client_session_timeout_seconds=60) as shop,
        ):
            sources: Any = {"mcp_servers": [shop]} if source == "mcp" else {"tools": [price]}
            model = getattr(agents, kind)(model=MODEL, openai_client=client)
            settings = agents.ModelSettings(temperature=0, store=False)
            agent = agents.Agent(
                name="clerk", instructions="Be brief.", model=model, model_settings=settings, **sources
            )
            tools = [declared(one) for one in await agent.get_all_tools(agents.RunContextWrapper(None))]
            result = "23"
            if source == "mcp":
                result = "1 lamp: 23, says nobody"
            script(scripted, tools, [{"role": "system", "content": "Be brief."}, *ASKED], result)
            whole = await agents.Runner.run(agent, QUESTION)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            return whole, streamed

    def declared(tool: Any) -> Any:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.params_json_schema}
        return {"type": "function", "function": function | {"strict": tool.strict_json_schema}}

    whole, streamed = asyncio.run(run())
    assert (whole.final_output, streamed.final_output) == (ANSWER, ANSWER)
    assert whole.context_wrapper.usage.requests == 2
