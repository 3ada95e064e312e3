"""smolagents' agent that calls tools. Argument: whether to stream."""

# pyright: reportMissingImports=false
import os
import sys
from typing import Any

import smolagents
from price_tools import QUESTIONS, price, report, stock


def main(api: str, how: str) -> None:
    model = smolagents.OpenAIServerModel(model_id=os.environ["MODEL"])
    agent: Any = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(price), smolagents.tool(stock)],
        model=model,
        stream_outputs=how == "stream",
        verbosity_level=0,
    )
    for question in QUESTIONS:
        report(agent.run(question, reset=question == QUESTIONS[0]))


main(*sys.argv[1:])
