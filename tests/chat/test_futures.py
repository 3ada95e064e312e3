"""Futures: a chat model goes on while its calls run, and reads their results as tool messages."""

import asyncio
import threading
from typing import Any

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.futures import future_of
from jinfercept.engine.tool_executor import CURRENT_CALL
from jinfercept.errors import RequestError
from jinfercept.events import Intercepted
from jinfercept.hooks import SharedLimit
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
        assert go.wait(60)
        assert CURRENT_CALL.get().request_id.startswith("request-")
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
    assert [pause.results[0].status for pause in output.interceptions] == ["error", "started", "error"]
    assert output.outputs[0].messages[-1]["content"] == "Oh."


def test_beyond_the_limit_a_call_is_waited_for(make_scripted: Make) -> None:
    scripted, (tool, go) = make_scripted(QWEN), slow()
    both = [f"<tool_response>\n{text}\n</tool_response>" for text in (placeholder(1), "3")]
    first = result("|").replace("<tool_response>\n|\n</tool_response>", "\n".join(both))
    written = [CALL + "\n" + CALL.replace("lamp", "pen"), first, "Hm.", result("23"), "26.", END]
    go.set()
    output = ask_with(scripted, written, tool, options=AsyncCalls(max_pending=1))
    assert [[result.status for result in pause.results] for pause in output.interceptions] == [
        ["started", "ok"],
        ["ok"],
    ]
    full = SharedLimit(0)  # other requests have reached it
    written = [CALL + "\n" + CALL.replace("lamp", "pen"), first.replace(placeholder(1), "23"), "26.", END]
    output = ask_with(scripted, written, tool, options=AsyncCalls(shared_limit=full))
    assert output.outputs[0].messages[-1]["content"] == "26."
    assert full.number == 0, "nothing was taken, and nothing is given back"


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_not_read_at_the_end_is_cancelled(make_scripted: Make, ends: bool) -> None:
    """At an end of text where the options say so, and at the limit of rounds. The async tool is cancelled."""
    scripted, over = make_scripted(QWEN), threading.Event()

    async def price(item: str) -> str:
        """The price of an item."""
        try:
            await asyncio.sleep(60)
        finally:
            over.set()
        return item

    tool = Tool(price, calls="async")
    options: dict[str, Any] = {"async_calls": AsyncCalls(on_end="cancel")} if ends else {"max_rounds": 1}
    output = ask(scripted, CALL, result(placeholder(1)), "Bye.", END, tools=[tool], **options)
    [cancelled] = output.outputs[0].cancelled
    assert (cancelled.name, output.outputs[0].messages[-1]["content"]) == ("price", "Bye.")
    assert over.wait(60)


def test_calls_of_one_turn_run_in_the_mode_of_their_tools(make_scripted: Make) -> None:
    """At the same time, which is the default, or one after the other."""
    scripted, both = make_scripted(QWEN), threading.Barrier(2)
    met, patience_s = list[bool](), [0.0]

    def price(item: str) -> str:
        """The price of an item."""
        try:
            both.wait(patience_s[0])
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)
        return item

    two = [f"<tool_response>\n{item}\n</tool_response>" for item in ("lamp", "pen")]
    answered = result("|").replace("<tool_response>\n|\n</tool_response>", "\n".join(two))
    written = [CALL + "\n" + CALL.replace("lamp", "pen"), answered, "26.", END]
    for options, together in ((AsyncCalls(calls="parallel"), True), (AsyncCalls(calls="sync"), False), (None, True)):
        both.reset()
        patience_s[0] = 20.0 if together else 0.1
        output = ask(scripted, *written, tools=[price], async_calls=options)
        assert output.outputs[0].messages[-1]["content"] == "26."
        assert met == [together] * 2
        met.clear()


def test_the_name_of_the_tool_that_waits_is_taken(make_scripted: Make) -> None:
    def await_future(future: str) -> str:
        """Another one."""
        return future

    with pytest.raises(RequestError, match="two tools have one name"):
        make_scripted(QWEN).llm.chat(QUESTION, tools=[slow()[0], await_future])


def ask_with(scripted: Any, written: list[str], tool: Tool, on_event: Any = None, options: Any = None) -> Any:
    return ask(scripted, *written, tools=[tool], on_event=on_event, async_calls=options)


def test_arguments_that_are_nested_too_deeply_are_no_name_and_no_json() -> None:
    deep = '{"item": ' + "[" * 60_000 + "}"
    assert future_of(Call("await_future", deep), Result("")) is None
    [tool] = chat_tools([price])
    assert tool.tool is not None
    with pytest.raises(RequestError, match="the arguments of price are not JSON"):
        tool.tool.function(deep)
