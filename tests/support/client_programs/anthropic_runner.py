"""The tool runner of Anthropic's SDK. Argument: whether to stream."""

import os
import sys
from typing import Any

import anthropic
from price_tools import BRIEF, QUESTIONS, price, report, stock


def main(api: str, how: str) -> None:
    tools: Any = [anthropic.beta_tool(price), anthropic.beta_tool(stock)]
    messages: list[Any] = []
    with anthropic.Anthropic(max_retries=0) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            fields: Any = {"model": os.environ["MODEL"], "max_tokens": 500, "system": BRIEF, "tools": tools}
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


main(*sys.argv[1:])
