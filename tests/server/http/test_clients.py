"""The helpers of OpenAI's client that parse answers and calls."""

from typing import Any, Literal

from pydantic import BaseModel

from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED, CALL, QUESTION
from tests.support.scripted_model import Scripted


class Price(BaseModel):
    """What something costs."""

    item: str
    dollars: int
    kind: Literal["new", "used"]


PRICED = '{"item": "lamp", "dollars": 23, "kind": "new"}'


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
