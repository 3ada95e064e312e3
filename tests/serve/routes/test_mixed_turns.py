"""Turns that call tools of the server and of the client, in chats and messages, and the follow-ups to them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.anthropic_client import create, streamed
from tests.support.live_server import END, Running, prompt_of, until
from tests.support.scripted_model import Scripted
from tests.support.tool_server import BUY, QUESTION, ask, ask_and_leave, asks, cached, called, returned, says, shop

TOOLS = {"temperature": 0, "jinfercept": {"server_tools": True}}
BOUGHT: Any = {"name": "buy", "input_schema": BUY["function"]["parameters"]}
LAMP = [*QUESTION, called("Let me see.", ("price", "lamp")), returned("23")]
ANSWER = "It costs 23."
THANKS: Any = {"role": "user", "content": "Thanks"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_runs_its_call_and_the_client_sees_one_text(
    server: Running, scripted: Scripted, stream: bool
) -> None:
    before = says(scripted, server, ANSWER, LAMP, own=[BUY])
    fields: Any = {"tools": [BOUGHT], "extra_body": TOOLS}
    done = streamed(server, QUESTION, **fields)[1] if stream else create(server, QUESTION, **fields)
    assert [(block.type, block.text) for block in done.content] == [("text", f"Let me see.\n\n{ANSWER}")]
    assert done.stop_reason == "end_turn"
    if not stream:
        [report] = done.jinfercept["server_calls"]
        assert (report["name"], report["status"]) == ("price", "ok")
    whole = [*LAMP, {"role": "assistant", "content": ANSWER}, THANKS]
    says(scripted, server, "Bye.", whole, own=[BUY])
    bye = create(server, [*QUESTION, done.to_param(), THANKS], **fields)
    assert bye.content[0].text == "Bye."
    assert bye.usage.cache_read_input_tokens >= len(scripted.tokenizer.encode(before)) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_mixed_turn_the_client_gets_its_own_call(server: Running, scripted: Scripted, stream: bool) -> None:
    says(scripted, server, f"{asks('price', 'lamp')}\n{asks('buy', 'lamp')}", QUESTION, own=[BUY])
    fields: Any = {"tools": [BOUGHT], "extra_body": TOOLS}
    done = streamed(server, QUESTION, **fields)[1] if stream else create(server, QUESTION, **fields)
    assert [(call.name, call.input) for call in done.content] == [("buy", {"item": "lamp"})]
    assert done.stop_reason == "tool_use"
    both = called("", ("price", "lamp"), ("buy", "lamp"))
    says(scripted, server, "Bought.", [*QUESTION, both, returned("23"), returned("done")], own=[BUY])
    back = {"type": "tool_result", "tool_use_id": done.content[0].id, "content": "done"}
    answer = create(server, [*QUESTION, done.to_param(), {"role": "user", "content": [back]}], **fields)
    assert answer.content[0].text == "Bought."


TURN = f"{asks('price', 'lamp')}\n{asks('buy', 'lamp')}\n{asks('price', 'pen')}"
BOTH = called("", ("price", "lamp"), ("buy", "lamp"), ("price", "pen"))


def message_of(done: Any) -> dict[str, Any]:
    """The client's copy of an answer, as OpenAI's client writes it."""
    return done.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


def follow_up(server: Running, scripted: Scripted, before: str, messages: list[Any], shown: list[Any]) -> int:
    """Tokens of the earlier context that a follow-up computes again.

    Args:
        before: what the model had read and written.
        messages: what it is to read.
        shown: what the client sends.
    """
    says(scripted, server, "Bye.", messages, own=[BUY])
    done = ask(server, shown, tools=[BUY])
    assert done.choices[0].message.content == "Bye."
    return len(scripted.tokenizer.encode(before)) - cached(done)


def test_hidden_rounds_are_read_again_when_the_client_goes_on(server: Running, scripted: Scripted) -> None:
    before = says(scripted, server, "It costs 23.", LAMP, own=[BUY])
    answer = message_of(ask(server, QUESTION, tools=[BUY]))
    whole = [*LAMP, {"role": "assistant", "content": "It costs 23."}, THANKS]
    assert follow_up(server, scripted, before, whole, [*QUESTION, answer, THANKS]) <= 1
    later = [*whole, {"role": "assistant", "content": "Bye."}, THANKS]
    shown = [*QUESTION, answer, THANKS, {"role": "assistant", "content": "Bye."}, THANKS]
    assert follow_up(server, scripted, before, later, shown) < 0


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_mixed_turn_the_client_runs_its_own_calls_and_the_model_reads_all_results(
    server: Running, scripted: Scripted, stream: bool
) -> None:
    before = says(scripted, server, TURN, QUESTION, own=[BUY])
    done = ask(server, QUESTION, tools=[BUY], stream=stream)
    if stream:
        *_, last = chunks = list(done)
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert {call.index for call in deltas} == {0}
        assert (deltas[0].function.name, last.choices[0].finish_reason) == ("buy", "tool_calls")
        text = "".join(call.function.arguments for call in deltas)
        call = {"id": deltas[0].id, "type": "function", "function": {"name": "buy", "arguments": text}}
        answer: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
        reports = last.jinfercept["server_calls"]
    else:
        answer, reports = message_of(done), done.jinfercept["server_calls"]
        assert done.choices[0].finish_reason == "tool_calls"
    assert [(report["name"], report["status"], report["context"]) for report in reports] == [("price", "ok", None)] * 2
    [call] = answer["tool_calls"]
    assert call["function"]["name"] == "buy"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "bought"}
    whole = [*QUESTION, BOTH, returned("23"), returned("bought"), returned("4")]
    assert follow_up(server, scripted, before, whole, [*QUESTION, answer, result]) <= 1


def test_conversations_whose_models_choose_the_same_ids_do_not_read_each_others_turns(
    server: Running, scripted: Scripted
) -> None:
    turn = asks("buy", "lamp").replace('{"name"', '{"id": "c1", "name"')
    before = says(scripted, server, turn, LAMP, own=[BUY])
    answer, result = (
        message_of(ask(server, QUESTION, tools=[BUY])),
        {"role": "tool", "tool_call_id": "c1", "content": "bought"},
    )
    assert (answer["content"], answer["tool_calls"][0]["id"]) == ("Let me see.", "c1")
    pen = [answer["tool_calls"][0] | {"function": {"name": "buy", "arguments": '{"item": "pen"}'}}]
    other = {"role": "user", "content": "A pen, please."}
    for first, content in ((other, None), (QUESTION[0], "Let me see."), (QUESTION[0], None)):
        read = [first, called(content or "", ("buy", "pen")), returned("bought")]
        says(scripted, server, "Bye.", read, own=[BUY])
        shown = [first, {"role": "assistant", "content": content, "tool_calls": pen}, result]
        assert message_of(ask(server, shown, tools=[BUY]))["content"] == "Bye."
    whole = prompt_of(
        scripted, [*LAMP, called("", ("buy", "lamp")), returned("bought")], [BUY, *server.service.tools.tools.values()]
    )
    behind = whole.rpartition(f"</tool_call>{END}")[2]
    scripted.follow(f"{before}{behind}Bye.{END}")
    assert message_of(ask(server, [*QUESTION, answer, result], tools=[BUY]))["content"] == "Bye."


def test_a_call_of_a_tool_that_nobody_has_is_the_servers_to_answer(server: Running, scripted: Scripted) -> None:
    before = says(scripted, server, f"{asks('sell', 'lamp')}\n{asks('buy', 'lamp')}", QUESTION, own=[BUY])
    done = ask(server, QUESTION, tools=[BUY])
    [call] = message_of(done)["tool_calls"]
    assert call["function"]["name"] == "buy"
    turn = called("", ("sell", "lamp"), ("buy", "lamp"))
    results = [returned("error: no tool 'sell' (there are: hang, price)"), returned("bought")]
    shown = [*QUESTION, message_of(done), {"role": "tool", "tool_call_id": call["id"], "content": "bought"}]
    assert follow_up(server, scripted, before, [*QUESTION, turn, *results], shown) <= 1


def test_others_are_not_reminded(scripted: Scripted, tmp_path: Path) -> None:
    with shop(scripted, tmp_path, api_key=("one", "two")) as server:
        says(scripted, server, "It costs 23.", LAMP)
        answer = message_of(ask(server, QUESTION))
        shown = [*QUESTION, answer, THANKS]
        says(scripted, server, "Who are you?", shown)
        two = server.client.with_options(api_key="two").chat.completions
        extra: Any = {"jinfercept": {"server_tools": True}}
        done = two.create(model="scripted", messages=shown, temperature=0, extra_body=extra)
        assert done.choices[0].message.content == "Who are you?"


def test_a_server_call_of_a_mixed_turn_times_out_and_does_not_count_rounds(server: Running, scripted: Scripted) -> None:
    says(scripted, server, f"{asks('hang')}\n{asks('buy', 'lamp')}", QUESTION, own=[BUY])
    for extra, status in (({}, "timeout"), ({"max_rounds": 0}, "error")):
        done = ask(server, QUESTION, tools=[BUY], extra_body={"jinfercept": {"server_tools": True} | extra})
        assert [call.function.name for call in done.choices[0].message.tool_calls] == ["buy"]
        assert [call["status"] for call in done.jinfercept["server_calls"]] == [status]


def test_a_client_that_leaves_cancels_the_servers_part_of_a_mixed_turn(scripted: Scripted, tmp_path: Path) -> None:
    with shop(scripted, tmp_path, patience_s=600) as server:
        says(scripted, server, f"{asks('hang')}\n{asks('buy', 'lamp')}", QUESTION, own=[BUY])
        ask_and_leave(server, QUESTION, (tmp_path / "begun").exists, tools=[BUY])
        until((tmp_path / "cancelled").exists)
