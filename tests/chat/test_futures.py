"""Futures: a chat model goes on while its calls run, and reads their results as tool messages."""

import threading
from typing import Any

import pytest

from jinfercept.errors import RequestError
from jinfercept.events import Intercepted
from jinfercept.intercept.dispatcher import CALLER
from jinfercept.request import Tool
from tests.chat.test_chats import CALL, END, QUESTION, ask, price, result
from tests.support.chat_templates import QWEN
from tests.support.scripted_model import Make

AWAIT = '<tool_call>\n{"name": "await_future", "arguments": {"future": "future_1"}}\n</tool_call>'


def placeholder(number: int) -> str:
    return f"future_{number} (the call runs; its result follows as a tool message, await_future waits for it)"


def slow(fails: bool = False) -> tuple[Tool, threading.Event]:
    """A tool with asynchronous calls, and the event on which its calls return."""
    go = threading.Event()

    def answer(item: str) -> str:
        """The price of an item."""
        assert go.wait(20)
        assert CALLER.get().startswith("request-")
        if fails:
            raise ValueError("sold out")
        return price(item)

    return Tool(answer, name="price", calls="async"), go


def go_at(go: threading.Event, number: int) -> Any:
    """Lets calls return once the request has paused so many times."""
    pauses: list[Intercepted] = []

    def on_event(event: object) -> None:
        if isinstance(event, Intercepted):
            pauses.append(event)
            if len(pauses) == number:
                go.set()

    return on_event


def test_a_turn_without_a_call_waits_for_the_result_and_the_model_goes_on(make_scripted: Make) -> None:
    scripted, (tool, go) = make_scripted(QWEN), slow()
    written = [CALL, result(placeholder(1)), "Meanwhile.", result("23"), "It costs 23.", END]
    output = ask_with(scripted, written, tool, go_at(go, 2))
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    roles = [(message["role"], message.get("content")) for message in completion.messages]
    assert roles == [
        ("assistant", ""),
        ("tool", placeholder(1)),
        ("assistant", "Meanwhile."),
        ("tool", "23"),
        ("assistant", "It costs 23."),
    ]
    ids = {message["tool_call_id"] for message in completion.messages if message["role"] == "tool"}
    assert ids == {completion.messages[0]["tool_calls"][0]["id"]}


def test_a_model_waits_for_a_future_by_its_name_and_reads_its_result_once(make_scripted: Make) -> None:
    scripted, (tool, go) = make_scripted(QWEN), slow()
    written = [CALL, result(placeholder(1)), AWAIT, result("23"), "It costs 23.", END]
    output = ask_with(scripted, written, tool, go_at(go, 2))
    assert [len(pause.calls) for pause in output.interceptions] == [1, 1]
    assert [pause.results[0].text for pause in output.interceptions] == [placeholder(1), "23"]
    assert output.outputs[0].messages[-1]["content"] == "It costs 23."


def test_two_futures_return_in_the_order_of_their_calls(make_scripted: Make) -> None:
    scripted, (tool, go) = make_scripted(QWEN), slow()
    both = [f"<tool_response>\n{text}\n</tool_response>" for text in (placeholder(1), placeholder(2))]
    first = result("|").replace("<tool_response>\n|\n</tool_response>", "\n".join(both))
    prices = first.replace(placeholder(1), "23").replace(placeholder(2), "3")
    written = [CALL + "\n" + CALL.replace("lamp", "pen"), first, "Hm.", prices, "26.", END]
    output = ask_with(scripted, written, tool, go_at(go, 2))
    assert [result.text for result in output.interceptions[1].results] == ["23", "3"]
    assert output.outputs[0].messages[-1]["content"] == "26."


def test_what_a_tool_raises_and_an_unknown_future_are_errors_to_read(make_scripted: Make) -> None:
    scripted, (tool, go) = make_scripted(QWEN), slow(fails=True)
    go.set()
    wrong = AWAIT.replace("future_1", "future_9")
    unknown = (
        'error: RequestError: there is no such future; got {"future": "future_9"}; fix: name one that a call returned'
    )
    written = [
        wrong,
        result(unknown),
        CALL,
        result(placeholder(1)),
        AWAIT,
        result("error: ValueError: sold out"),
        "Oh.",
        END,
    ]
    output = ask_with(scripted, written, tool)
    assert [pause.results[0].status for pause in output.interceptions] == ["error", "ok", "error"]
    assert output.outputs[0].messages[-1]["content"] == "Oh."


def test_the_name_of_the_tool_that_waits_is_taken(make_scripted: Make) -> None:
    def await_future(future: str) -> str:
        """Another one."""
        return future

    with pytest.raises(RequestError, match="two tools have one name"):
        make_scripted(QWEN).llm.chat(QUESTION, tools=[slow()[0], await_future])


def ask_with(scripted: Any, written: list[str], tool: Tool, on_event: Any = None) -> Any:
    return ask(scripted, *written, tools=[tool], on_event=on_event)
