"""Tools that the server runs for a response: complete calls in its output, which follow-ups contain."""

from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall
from openai.types.responses.response_output_item import McpCall

from tests.support.live_server import END, MODEL, Running, prompt_of, until
from tests.support.scripted_model import Scripted
from tests.support.tool_server import ALL, QUESTION, asks, called, returned, says, shop

HOW_MUCH = QUESTION[0]["content"]
THANKS = "Thanks"
BUY: Any = {"type": "function", "name": "buy", "parameters": {"type": "object", "properties": {}}}
CHAT_BUY = {"type": "function", "function": {name: value for name, value in BUY.items() if name != "type"}}
TURN = f"{asks('price', 'lamp')}\n{asks('buy')}\n{asks('price', 'pen')}"
LAMP = [*QUESTION, called("Let me see.", ("price", "lamp")), returned("23")]
BOTH = [called("", ("price", "lamp"), ("buy", None), ("price", "pen")), returned("23"), returned("yes"), returned("4")]


def ask(server: Running, question: Any, **fields: Any) -> Any:
    """OpenAI's client at temperature 0, with all of the server's tools."""
    create: Any = server.client.responses.create
    return create(**({"model": MODEL, "input": question, "temperature": 0, "extra_body": ALL, "tools": [BUY]} | fields))


def hears(scripted: Scripted, server: Running, text: str, messages: list[Any]) -> int:
    """Script the model's answer to a conversation; returns the tokens of both."""
    return len(scripted.tokenizer.encode(says(scripted, server, text, messages, own=[CHAT_BUY])))


def sent(done: Any) -> list[dict[str, Any]]:
    """The output as input items of a client that stores nothing on the server."""
    return [item.model_dump(exclude_none=True) for item in done.output]


def test_calls_of_the_server_are_items_that_are_complete(server: Running, scripted: Scripted) -> None:
    hears(scripted, server, "It costs 23.", LAMP)
    done = ask(server, HOW_MUCH)
    first, call, last = done.output
    assert isinstance(call, McpCall)
    assert (call.name, call.arguments, call.output, call.status) == ("price", '{"item": "lamp"}', "23", "completed")
    note = call.model_extra["jinfercept"] if call.model_extra else {}
    assert (note["round"], note["status"], note["context"]["copied_in"]) == (0, "ok", 0)
    assert done.jinfercept["server_calls"] == [
        {"id": note["call_id"], "name": "price"} | {key: note[key] for key in ("round", "status", "seconds", "context")}
    ]
    assert (first.content[0].text, last.content[0].text, done.status) == ("Let me see.", "It costs 23.", "completed")


def test_calls_to_which_the_model_gives_one_id_have_their_own_results(server: Running, scripted: Scripted) -> None:
    turn = f"{asks('price', 'lamp')}\n{asks('price', 'pen')}".replace('{"name"', '{"id": "c1", "name"')
    called_twice = [called("", ("price", "lamp"), ("price", "pen")), returned("23"), returned("4")]
    tools = [CHAT_BUY, *server.service.tools.tools.values()]
    behind = prompt_of(scripted, [*QUESTION, *called_twice], tools).rpartition(f"</tool_call>{END}")[2]
    last = asks("buy").replace('{"name"', '{"id": "c1", "name"')
    scripted.follow(f"{prompt_of(scripted, QUESTION, tools)}{turn}{END}{behind}{last}{END}")
    lamp, pen, buy = ask(server, HOW_MUCH).output
    assert isinstance(buy, ResponseFunctionToolCall)
    outputs = [(call.arguments, call.output, call.status) for call in (lamp, pen)]
    assert outputs == [('{"item": "lamp"}', "23", "completed"), ('{"item": "pen"}', "4", "completed")]
    ids = [lamp.jinfercept["call_id"], pen.jinfercept["call_id"], buy.call_id]
    assert ids[0] == "c1"
    assert len({*ids}) == 3


@pytest.mark.parametrize("stored", [True, False])
def test_whoever_goes_on_has_the_calls_read_again(server: Running, scripted: Scripted, stored: bool) -> None:
    there = hears(scripted, server, "It costs 23.", LAMP)
    done = ask(server, HOW_MUCH)
    whole = [*LAMP, {"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": THANKS}]
    hears(scripted, server, "Bye.", whole)
    new: Any = {"role": "user", "content": THANKS}
    fields = {"previous_response_id": done.id} if stored else {"store": False}
    after = ask(server, [new] if stored else [QUESTION[0], *sent(done), new], **fields)
    assert after.output_text == "Bye."
    assert after.usage.input_tokens_details.cached_tokens >= there - 1


@pytest.mark.parametrize("stored", [True, False])
def test_a_mixed_turn_after_a_round_is_read_again_call_by_call(
    server: Running, scripted: Scripted, stored: bool
) -> None:
    rounds = [*QUESTION, called("", ("price", "lamp")), returned("23")]
    there = hears(scripted, server, TURN, rounds)
    done = ask(server, HOW_MUCH)
    assert [(item.type, item.status) for item in done.output] == [
        ("mcp_call", "completed"),
        ("mcp_call", "completed"),
        ("function_call", "completed"),
        ("mcp_call", "completed"),
    ]
    [call] = [item for item in done.output if isinstance(item, ResponseFunctionToolCall)]
    hears(scripted, server, "Bye.", [*rounds, *BOTH])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}
    fields = {"previous_response_id": done.id} if stored else {"store": False}
    after = ask(server, [result] if stored else [QUESTION[0], *sent(done), result], **fields)
    assert after.output_text == "Bye."
    assert after.usage.input_tokens_details.cached_tokens >= there - 1


def test_a_stream_says_when_a_call_begins_runs_and_ends(server: Running, scripted: Scripted) -> None:
    hears(scripted, server, "It costs 23.", [*QUESTION, called("", ("price", "lamp")), returned("23")])
    events = list(ask(server, HOW_MUCH, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type.startswith("response.mcp") or "item" in event.type]
    assert [kind for kind in kinds if "delta" not in kind] == [
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.output_item.done",
    ]
    pieces = [event.delta for event in events if event.type == "response.mcp_call_arguments.delta"]
    assert "".join(pieces) == '{"item": "lamp"}'
    assert events[-1].response.output[0].output == "23"


def test_failures_say_so_and_the_limit_of_rounds_ends_a_response(server: Running, scripted: Scripted) -> None:
    told = "error: TimeoutError: it took longer than 0.3 s"
    hears(scripted, server, asks("price", "pen"), [*QUESTION, called("", ("hang", None)), returned(told)])
    done = ask(server, HOW_MUCH, extra_body={"jinfercept": {"server_tools": True, "max_rounds": 1}})
    late, left = done.output
    assert (late.status, late.error.content[0]["text"]) == ("failed", told)
    assert (left.status, left.output) == ("incomplete", None)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_tool_calls")


def test_no_more_calls_are_run_than_max_tool_calls(server: Running, scripted: Scripted) -> None:
    """The model reads that the others were not, those of a turn with calls of the client too."""
    told = "error: not run: max_tool_calls is 1"
    calls = [called("", ("price", "lamp"), ("price", "lamp")), returned("23"), returned(told)]
    hears(scripted, server, asks("price", "lamp") + asks("buy"), [*QUESTION, *calls])
    done = ask(server, HOW_MUCH, max_tool_calls=1)
    assert (done.max_tool_calls, done.status) == (1, "completed")
    ran = [(item.output, item.status) for item in done.output if item.type == "mcp_call"]
    assert ran == [("23", "completed"), (told, "failed"), (told, "failed")]
    assert ask(server, HOW_MUCH, tools=[], max_output_tokens=1).max_tool_calls is None


@pytest.mark.parametrize("mixed", [False, True])
def test_a_response_in_the_background_is_cancelled_with_its_calls(
    scripted: Scripted, tmp_path: Path, mixed: bool
) -> None:
    with shop(scripted, tmp_path, patience_s=600) as server:
        hears(scripted, server, asks("hang") + (f"\n{asks('buy')}" if mixed else ""), QUESTION)
        begun = ask(server, HOW_MUCH, background=True)
        until((tmp_path / "begun").exists)
        done = server.client.responses.cancel(begun.id)
        assert done.status == "cancelled"
        assert done.output[0].status == "incomplete"  # pyright: ignore[reportAttributeAccessIssue] # a call
        until((tmp_path / "cancelled").exists)
