"""A program with one of the client libraries: asks two questions, runs tools over three turns, and prints each answer.

Arguments: the program, which is a function here; the API or provider that it uses; `whole` or `stream`. A program imports only
its own library.
"""

# pyright: reportMissingImports=false
import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

MODEL = os.environ.get("MODEL", "")
QUESTIONS = ("How much is a lamp?", "And two?")
BRIEF = "Be brief."


def price(item: str) -> str:
    """The price of an item.

    Args:
        item: what it is.
    """
    return {"lamp": "23", "pen": "4"}[item]


def stock(item: str) -> str:
    """How many there are.

    Args:
        item: what it is.
    """
    raise ValueError("not for sale")


def stock_raising(kind: type[Exception]) -> Any:
    """The tool `stock`, whose failure is an exception of a library's own."""

    def failing(item: str) -> str:
        """How many there are."""
        try:
            return stock(item)
        except ValueError as error:
            raise kind(str(error)) from error

    return failing


def report(text: str, pieces: int | None = None) -> None:
    """Print an answer, and the number of pieces in which it came."""
    print()  # ends a line that a library has begun
    print(json.dumps({"text": text, "pieces": pieces}), flush=True)


async def adk(provider: str, how: str) -> None:
    """An agent of Google's ADK, on LiteLLM."""
    from google.adk.agents import Agent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    def stock_or_error(item: str) -> dict[str, Any]:
        """How many there are."""
        try:
            return {"number": stock(item)}
        except ValueError as error:
            return {"error": str(error)}

    stock_or_error.__name__ = "stock"
    model = LiteLlm(model=f"{provider}/{MODEL}")
    agent = Agent(name="clerk", model=model, instruction=BRIEF, tools=[price, stock_or_error])
    runner = InMemoryRunner(agent=agent)
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


def anthropic(api: str, how: str) -> None:
    """The tool runner of Anthropic's SDK."""
    import anthropic

    tools: Any = [anthropic.beta_tool(price), anthropic.beta_tool(stock)]
    messages: list[Any] = []
    with anthropic.Anthropic(max_retries=0) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            fields: Any = {"model": MODEL, "max_tokens": 500, "system": BRIEF, "tools": tools}
            runner: Any = client.beta.messages.tool_runner(**fields, messages=[*messages], stream=how == "stream")
            message: Any = None
            pieces = None
            for each in runner:
                message = each
                if how == "stream":
                    pieces = sum(event.type == "text" for event in each)
                    message = each.get_final_message()
                messages.append({"role": "assistant", "content": message.content})
                if (results := runner.generate_tool_call_response()) is not None:
                    messages.append(results)
            report("".join(block.text for block in message.content if block.type == "text"), pieces)


def langchain(api: str, how: str) -> None:
    """LangChain's agent."""
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import AIMessageChunk
    from langchain_core.tools import StructuredTool, ToolException
    from langchain_openai import ChatOpenAI

    model: Any
    match api:
        case "messages":
            model = ChatAnthropic(model=MODEL)
        case "responses":
            model = ChatOpenAI(model=MODEL, use_responses_api=True)
        case "stored":
            model = ChatOpenAI(model=MODEL, use_responses_api=True, use_previous_response_id=True)
        case _:
            model = ChatOpenAI(model=MODEL, stream_usage=True)
    failing = StructuredTool.from_function(stock_raising(ToolException), name="stock", handle_tool_error=True)
    agent: Any = create_agent(model, [StructuredTool.from_function(price), failing], system_prompt=BRIEF)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        if how == "stream":
            pieces, after = 0, messages
            for mode, value in agent.stream({"messages": messages}, stream_mode=["messages", "values"]):
                if mode == "values":
                    after = value["messages"]
                else:
                    pieces += isinstance(value[0], AIMessageChunk) and bool(value[0].text)
        else:
            after, pieces = agent.invoke({"messages": messages})["messages"], None
        messages = list(after)
        assert messages[-1].usage_metadata["output_tokens"] > 3
        report(messages[-1].text, pieces)


def langchain_structured(method: str) -> None:
    """LangChain's structured output by a method; prints the object that it makes."""
    from typing import Literal

    from langchain_openai import ChatOpenAI
    from pydantic import create_model

    fields: Any = {"item": (str, ...), "dollars": (int, ...), "kind": (Literal["new", "used"], ...)}
    schema = create_model("Price", __doc__="What something costs.", **fields)
    structured: Any = ChatOpenAI(model=MODEL).with_structured_output(schema, method=method)
    report(structured.invoke(QUESTIONS[0]).model_dump_json())


def litellm(provider: str, how: str) -> None:
    """A loop on LiteLLM."""
    import litellm

    item = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    functions = {"price": price, "stock": stock}
    described = {"price": "The price of an item.", "stock": "How many there are."}
    declared = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": item}}
        for name, text in described.items()
    ]
    model = f"{provider}/{MODEL}"

    def run(call: Any) -> str:
        try:
            return functions[call.function.name](**json.loads(call.function.arguments))
        except Exception as error:
            return f"error: {error}"

    def turn(messages: list[Any]) -> tuple[Any, int | None]:
        if how == "whole":
            return litellm.completion(model, messages, tools=declared).choices[0].message, None
        options = {"include_usage": True}
        chunks = list(litellm.completion(model, messages, tools=declared, stream=True, stream_options=options))
        built: Any = litellm.stream_chunk_builder(chunks, messages=messages)
        assert built.usage.completion_tokens > 3
        return built.choices[0].message, sum(bool(chunk.choices[0].delta.content) for chunk in chunks if chunk.choices)

    messages: list[Any] = [{"role": "system", "content": BRIEF}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            message, pieces = turn(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [{"role": "tool", "tool_call_id": call.id, "content": run(call)} for call in message.tool_calls]
        report(message.content, pieces)


async def openai_agents(api: str, how: str) -> None:
    """OpenAI's agents SDK; `api` also says what has the tools or keeps the conversation."""
    import agents
    from agents.mcp import MCPServerStdio

    if api in ("chat", "mcp"):
        agents.set_default_openai_api("chat_completions")
    settings = agents.ModelSettings(store=api != "responses")
    session = agents.OpenAIConversationsSession() if api == "conversation" else None
    more: dict[str, Any] = {"auto_previous_response_id": True} if api == "stored" else {}
    history: list[Any] = []
    async with AsyncExitStack() as stack:
        if api == "mcp":
            start: Any = {"command": sys.executable, "args": [__file__, "mcp_server"], "env": dict(os.environ)}
            server = await stack.enter_async_context(MCPServerStdio(start, client_session_timeout_seconds=60))
            tools: dict[str, Any] = {"mcp_servers": [server]}
        else:
            failing = agents.function_tool(stock, failure_error_function=lambda _, error: str(error))
            tools = {"tools": [agents.function_tool(price), failing]}
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


async def mcp_server() -> None:
    """An MCP server over stdio with the tools of the programs."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("shop")
    server.add_tool(price)
    server.add_tool(stock_raising(ToolError), name="stock")
    await server.run_stdio_async()


async def pydantic(api: str, how: str) -> None:
    """Pydantic AI's agent."""
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    models: dict[str, Any] = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
    agent = Agent(models[api](MODEL), instructions=BRIEF)
    agent.tool_plain(price)
    agent.tool_plain(name="stock", retries=3)(stock_raising(ModelRetry))
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


def smolagents(api: str, how: str) -> None:
    """smolagents' agent that calls tools."""
    import smolagents

    agent: Any = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(price), smolagents.tool(stock)],
        model=smolagents.OpenAIServerModel(model_id=MODEL),
        stream_outputs=how == "stream",
        verbosity_level=0,
    )
    for question in QUESTIONS:
        report(agent.run(question, reset=question == QUESTIONS[0]))


async def strands(api: str, how: str) -> None:
    """An agent of Strands."""
    import strands
    from strands.models.anthropic import AnthropicModel
    from strands.models.openai import OpenAIModel
    from strands.models.openai_responses import OpenAIResponsesModel

    models: dict[str, Any] = {"chat": OpenAIModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
    model = models[api](model_id=MODEL, **({"max_tokens": 500} if api == "messages" else {}))
    tools = [strands.tool(price), strands.tool(stock)]
    agent = strands.Agent(model=model, tools=tools, system_prompt=BRIEF, callback_handler=None)
    for question in QUESTIONS:
        events = [event async for event in agent.stream_async(question)]
        pieces = sum("data" in event for event in events) if how == "stream" else None
        report(str(events[-1]["result"]).strip(), pieces)


if __name__ == "__main__":
    running = globals()[sys.argv[1]](*sys.argv[2:])
    if running is not None:
        asyncio.run(running)
