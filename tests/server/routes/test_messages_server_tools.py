"""The server's tools in `/v1/messages`: their calls are hidden, and follow-ups find the context with them."""

from typing import Any

import pytest

from tests.support.anthropic_client import create, streamed
from tests.support.live_server import Running
from tests.support.scripted_model import Scripted
from tests.support.tool_server import BUY, QUESTION, asks, called, returned, says

TOOLS = {"temperature": 0, "jinfercept": {"server_tools": True}}
BOUGHT: Any = {"name": "buy", "input_schema": BUY["function"]["parameters"]}
LAMP = [*QUESTION, called("Let me see.", ("price", "lamp")), returned("23")]
ANSWER = "It costs 23."
THANKS = {"role": "user", "content": "Thanks"}


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
