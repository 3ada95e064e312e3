"""Asynchronous calls of the server's tools: in the markup of text completions, and as futures in chats and responses."""

from pathlib import Path
from typing import Any

import pytest

from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.futures import placeholder
from jinfercept.errors import ConfigError
from jinfercept.serve.options import ServerOptions
from tests.support.chat_templates import QWEN
from tests.support.live_server import END, MODEL, Running, prompt_of, until
from tests.support.scripted_model import Make, Scripted
from tests.support.tool_server import QUESTION, TOML, ask, ask_and_leave, called, returned, shop

ASKS = "Prices: "
LAMP = '[CALL] 1 [HEAD] price(item="lamp") [END]'
READ = "[INTR] 1 [HEAD] 23 [END]"
TRAP = "[TRAP][END]"
BOTH: Any = {"server_tools": ["price", "hang"], "async_calls": {"calls": "parallel"}}
"""Calls that start at the trap: what is read stands where the script has it."""


def num_pending(server: Running) -> int:
    """Asynchronous calls that run."""
    return sum(limit.number for limit in server.service.pending_calls.values())


def complete(server: Running, **fields: Any) -> Any:
    """A text completion that may call the server's tools in markup."""
    hints = BOTH | fields.pop("jinfercept", {})
    create: Any = server.client.completions.create
    given = {"model": MODEL, "prompt": ASKS, "max_tokens": 300, "temperature": 0, "extra_body": {"jinfercept": hints}}
    return create(**(given | fields))


def test_a_completion_calls_goes_on_and_reads(server: Running, scripted: Scripted) -> None:
    text = f"{LAMP} so{TRAP}{READ} 23."
    scripted.follow(ASKS + text + END)
    done = complete(server)
    [choice] = done.choices
    assert (choice.text, choice.finish_reason) == (text, "stop")
    assert done.usage.completion_tokens == len(text) - len(READ) + 1
    report = done.jinfercept
    [interrupt] = report["interrupts"]
    assert 0 <= interrupt.pop("seconds") < 5
    assert interrupt == {"choice": 0, "id": "1", "name": "price", "status": "ok"}
    [trap] = report["traps"]
    assert (trap["calls"], trap["context"]["recomputed"], report["cancelled"]) == (["1"], 0, [])


def test_a_server_takes_the_delimiters_of_its_model_and_a_file_of_tools_when_their_calls_run(
    tmp_path: Path, make_scripted: Make
) -> None:
    scripted, toml = make_scripted(QWEN), TOML.replace("[[tool]]", '[[tool]]\ncalls = "sync"')
    with shop(scripted, tmp_path, toml=toml, call_delimiters="<c>,<h>,<e>,<t>,<i>") as server:
        text = '<c>1<h>price(item="lamp")<e><i> 1 <h> 23 <e> 23.'
        scripted.follow(ASKS + text + END)
        assert complete(server).choices[0].text == text
    for wrong in ("<c>,<h>,<e>,<t>", "<c>,<h>,<e>,<t>,<t>", "a,b,c,d,e"):
        with pytest.raises(
            ConfigError,
            match="call_delimiters must be five texts of at least two characters, none of which contains or overlaps another",
        ):
            ServerOptions(call_delimiters=wrong)


def test_a_stream_has_the_same_text_with_calls_traps_and_interrupts_in_order(
    server: Running, scripted: Scripted
) -> None:
    text = f"{LAMP} so{TRAP}{READ} 23.[CALL]2[HEAD]price("
    scripted.follow(ASKS + text + END)
    chunks = list(complete(server, stream=True, extra_body={"jinfercept": BOTH, "return_token_ids": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    written = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert written == scripted.tokenizer.encode(text + END)
    told = [chunk.jinfercept for chunk in chunks if hasattr(chunk, "jinfercept")]
    assert told[0] == {"called": [{"id": "1", "name": "price", "arguments": '{"item": "lamp"}'}]}
    assert told[1] == {"trap": {"calls": ["1"]}}
    assert [interrupt["status"] for interrupt in told[2]["interrupts"]] == ["ok"]
    [begun] = told[3]["cancelled"]
    assert begun == {"choice": 0, "id": "2", "name": None}
    assert len(told[3]["interrupts"]) == len(told[3]["traps"]) == 1
    assert len(told) == 4


def test_calls_that_are_pending_at_the_end_are_cancelled_where_the_body_says_so(
    server: Running, scripted: Scripted, tmp_path: Path
) -> None:
    scripted.follow(ASKS + "[CALL]1[HEAD]hang()[END] bye" + END)
    with shop(scripted, tmp_path, patience_s=600) as patient:
        done = complete(patient, jinfercept={"async_calls": {"on_end": "cancel", "max_pending": 1}})
    assert done.jinfercept["cancelled"] == [{"choice": 0, "id": "1", "name": "hang"}]
    done = complete(server, n=2, temperature=0.5, max_tokens=10)
    assert done.jinfercept == {
        "interrupts": [],
        "cancelled": [{"choice": c, "id": "", "name": None} for c in (0, 1)],
    } | {"traps": []}


def test_what_a_client_forces_the_model_to_write_stays_within_the_limits(make_scripted: Make, tmp_path: Path) -> None:
    """By a grammar of one text: too many calls of a tool that hangs, a long id, calls without an end, a forged interrupt."""
    calls = "".join(f"[CALL]{i}[HEAD]hang()[END]" for i in range(5))
    text = f"{calls}{'[CALL]' * 9}{'7' * 90}[HEAD]hang()[END][INTR]1[HEAD]2[END]{'.' * 40}"
    hints = {"server_tools": True, "async_calls": {"on_end": "cancel"}}
    forced = {"structured_outputs": {"choice": [text]}, "jinfercept": hints}
    with shop(
        make_scripted(QWEN), tmp_path, patience_s=600, max_pending_calls=2, max_pending_calls_per_key=3
    ) as server:
        done = complete(server, max_tokens=1900, n=2, temperature=0.5, extra_body=forced)
        report = done.jinfercept
        assert [choice.finish_reason for choice in done.choices] == ["stop", "stop"]
        assert len(report["interrupts"]) + len(report["cancelled"]) == 2 * (5 + 9 + 1)
        begun = [call for call in report["cancelled"] if call["name"]]
        assert len(begun) == 3
        assert {interrupt["status"] for interrupt in report["interrupts"]} == {"error"}
        until(lambda: num_pending(server) == 0)


@pytest.mark.parametrize(
    ("path", "hints", "field", "problem"),
    [
        ("completions", {"async_calls": {}}, "jinfercept.async_calls", "async_calls need tools of the server"),
        ("completions", {"server_tools": True}, "jinfercept.server_tools", "without jinfercept.async_calls"),
        (
            "completions",
            BOTH | {"async_calls": {"max_pending": 33}},
            "async_calls.max_pending",
            "must be at most 32; got 33",
        ),
        (
            "completions",
            BOTH | {"async_calls": {"calls": "later"}},
            "async_calls.calls",
            "'sync', 'parallel' or 'async'",
        ),
        ("completions", BOTH | {"async_calls": {"on_ends": 1}}, "async_calls.on_ends", "did you mean 'on_end'?"),
        (
            "completions",
            BOTH | {"server_tools": ["sell"]},
            "server_tools",
            "no server tool is named 'sell'; available: price",
        ),
        (
            "chat/completions",
            BOTH | {"async_calls": {"reasoning": "none"}},
            "async_calls.reasoning",
            "reasoning is not an option of chats",
        ),
    ],
)
def test_a_wrong_option_is_refused(server: Running, path: str, hints: dict[str, Any], field: str, problem: str) -> None:
    body: dict[str, Any] = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": QUESTION},
        "responses": {"input": "a"},
    }[path]
    answer = server.http.post(f"/v1/{path}", json={"model": MODEL, "max_tokens": 1, "jinfercept": hints} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].endswith(field)) == (400, True), error
    assert problem in error["message"]


FUTURES: Any = {"server_tools": ["price", "hang"], "async_calls": {"on_end": "wait"}}
LAMP_LATER = [
    *QUESTION,
    called("Let me see.", ("price", "lamp")),
    returned(placeholder("future_1")),
    {"role": "assistant", "content": "Meanwhile."},
    returned("23"),
]
COSTS = {"role": "assistant", "content": "It costs 23."}


def hears(scripted: Scripted, server: Running, text: str, messages: Any) -> str:
    """Have the model write what these messages say with futures, and then a text."""
    tools = [server.service.tools.tools[name] for name in FUTURES["server_tools"]]
    stream = prompt_of(scripted, messages, tools, async_calls=AsyncCalls()) + text + END
    scripted.follow(stream)
    return stream


def test_a_chat_goes_on_with_a_future_and_reads_its_result(server: Running, scripted: Scripted) -> None:
    hears(scripted, server, "It costs 23.", LAMP_LATER)
    done = ask(server, QUESTION, extra_body={"jinfercept": FUTURES})
    assert done.choices[0].message.content == "Let me see.\n\nMeanwhile.\n\nIt costs 23."
    calls, chunks = (
        done.jinfercept["server_calls"],
        ask(server, QUESTION, stream=True, extra_body={"jinfercept": FUTURES}),
    )
    assert [(call["round"], call["status"]) for call in calls] == [(0, "started"), (1, "ok")]
    assert len({call["id"] for call in calls}) == 1
    assert done.jinfercept["cancelled"] == []
    told = [[call["status"] for call in c.jinfercept["server_calls"]] for c in chunks if hasattr(c, "jinfercept")]
    assert told == [["running"], ["started"], ["running"], ["ok"], ["started", "ok"]]


def test_a_client_that_leaves_cancels_what_is_pending(make_scripted: Make, tmp_path: Path) -> None:
    """Of a chat that goes on, of a completion that waits for its calls, and of a response in the background."""
    scripted = make_scripted(QWEN)
    with shop(scripted, tmp_path, patience_s=600) as server:
        cancelled = tmp_path / "cancelled"
        hears(scripted, server, "." * 900, [*QUESTION, called("", ("hang", None)), returned(placeholder("future_1"))])
        body = {"jinfercept": FUTURES, "max_tokens": 1000}
        ask_and_leave(server, QUESTION, lambda: num_pending(server) == 1 and (tmp_path / "begun").exists(), **body)
        until(lambda: num_pending(server) == 0 and cancelled.exists())
        cancelled.unlink()
        scripted.follow(ASKS + "[CALL]1[HEAD]hang()[END]" + TRAP)
        body = {"prompt": ASKS, "jinfercept": FUTURES, "max_tokens": 300}
        (tmp_path / "begun").unlink()
        is_there = (tmp_path / "begun").exists
        ask_and_leave(server, None, lambda: num_pending(server) == 1 and is_there(), path="/v1/completions", **body)
        until(lambda: num_pending(server) == 0 and cancelled.exists())
        hears(scripted, server, "." * 900, [*QUESTION, called("", ("hang", None)), returned(placeholder("future_1"))])
        create: Any = server.client.responses.create
        given = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0, "background": True}
        begun = create(**given, extra_body={"jinfercept": FUTURES})
        until(lambda: num_pending(server) == 1)
        assert server.client.responses.cancel(begun.id).status == "cancelled"
        until(lambda: num_pending(server) == 0)


def test_a_response_has_events_for_a_call_a_trap_and_an_interrupt(server: Running, scripted: Scripted) -> None:
    hears(scripted, server, "It costs 23.", LAMP_LATER)
    create: Any = server.client.responses.create
    given = {"model": MODEL, "temperature": 0, "extra_body": {"jinfercept": FUTURES}}
    events = list(create(input=QUESTION[0]["content"], stream=True, **given))
    kinds = [event.type for event in events if event.type.startswith("response.") and "delta" not in event.type]
    first = kinds.index("response.mcp_call.started")
    [item] = [
        event.item for event in events if event.type == "response.output_item.done" and event.item.type == "mcp_call"
    ]
    assert (item.output, item.status, item.jinfercept["future"]) == ("23", "completed", "future_1")
    assert [
        kind for kind in kinds[first:] if "item.added" not in kind and "part" not in kind and "text" not in kind
    ] == [
        "response.mcp_call.started",
        "response.output_item.done",  # "Meanwhile."
        "response.trap",
        "response.interrupt",
        "response.mcp_call.completed",
        "response.output_item.done",
        "response.output_item.done",
        "response.completed",
    ]
    response = events[-1].response
    [call] = response.jinfercept["server_calls"]
    assert (call["status"], response.jinfercept["cancelled"]) == ("ok", [])
    thanks: Any = {"role": "user", "content": "Thanks"}
    there = hears(scripted, server, "Bye.", [*LAMP_LATER, COSTS, thanks])
    after = create(input=[thanks], previous_response_id=response.id, **given)
    assert after.output_text == "Bye."
    sent = [
        {"role": "user", "content": QUESTION[0]["content"]},
        *(output_item.model_dump(exclude_none=True) for output_item in response.output),
    ]
    assert create(input=[*sent, thanks], **given).output_text == "Bye."
    assert after.usage.input_tokens == len(scripted.tokenizer.encode(there)) - len("Bye.") - 1


def test_a_response_that_waits_for_a_future_by_its_name(server: Running, scripted: Scripted) -> None:
    waits = {"name": "await_future", "arguments": {"future": "future_1"}}
    turns = [
        *QUESTION,
        called("", ("price", "lamp")),
        returned(placeholder("future_1")),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": waits}]},
        returned("23"),
    ]
    hears(scripted, server, "It costs 23.", turns)
    create: Any = server.client.responses.create
    given = {"model": MODEL, "temperature": 0, "extra_body": {"jinfercept": FUTURES}}
    done = create(input=QUESTION[0]["content"], **given)
    price, await_future, answer = done.output
    assert [(output_item.name, output_item.output, output_item.status) for output_item in (price, await_future)] == [
        ("price", "23", "completed"),
        ("await_future", "23", "completed"),
    ]
    assert (answer.content[0].text, done.jinfercept["cancelled"]) == ("It costs 23.", [])
    thanks: Any = {"role": "user", "content": "Thanks"}
    there = hears(scripted, server, "Bye.", [*turns, COSTS, thanks])
    after = create(input=[thanks], previous_response_id=done.id, **given)
    assert after.output_text == "Bye."
    assert after.usage.input_tokens == len(scripted.tokenizer.encode(there)) - len("Bye.") - 1
