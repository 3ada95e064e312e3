"""LangChain's agent. Arguments: the API of the model, and whether to stream."""

# pyright: reportMissingImports=false
import os
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import StructuredTool, ToolException
from langchain_openai import ChatOpenAI
from price_tools import BRIEF, QUESTIONS, price, report, stock


def failing(item: str) -> str:
    """How many there are."""
    try:
        return stock(item)
    except ValueError as error:
        raise ToolException(str(error)) from error


def main(api: str, how: str) -> None:
    name = os.environ["MODEL"]
    model: Any
    match api:
        case "messages":
            model = ChatAnthropic(model=name)
        case "responses":
            model = ChatOpenAI(model=name, use_responses_api=True)
        case "stored":
            model = ChatOpenAI(model=name, use_responses_api=True, use_previous_response_id=True)
        case _:
            model = ChatOpenAI(model=name, stream_usage=True)
    tools = [
        StructuredTool.from_function(price),
        StructuredTool.from_function(failing, name="stock", handle_tool_error=True),
    ]
    agent: Any = create_agent(model, tools, system_prompt=BRIEF)
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


main(*sys.argv[1:])
