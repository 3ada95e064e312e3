"""`/v1/messages` with Anthropic's client: answers, streams, tools, reasoning, and contexts that follow-ups find."""

import json
from typing import Any

import pytest
from anthropic import beta_tool

from jinfercept.serve.protocols.anthropic.chat import chat_body
from jinfercept.serve.protocols.anthropic.schemas import MessagesBody
from tests.support.anthropic_client import ASKED, PRICE, anthropic, create, post, streamed
from tests.support.chat_templates import QWEN3, QWEN3_CODER
from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import CALL, CHAT_PRICE, PEN, says
from tests.support.scripted_model import Make, Scripted

ANSWER = "It costs 23."


def turn(text: str, *items: str) -> dict[str, Any]:
    """A turn of the model, as a chat template reads it."""
    calls = [{"id": "x", "function": {"name": "price", "arguments": {"item": item}}} for item in items]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "x", "content": text}


def declared(tools: list[Any]) -> list[dict[str, Any]]:
    """The tools of a body, as a chat template reads them."""
    body = MessagesBody(max_tokens=1, messages=ASKED, tools=tools)
    return [{name: tool[name] for name in ("type", "function")} for tool in chat_body(body).tools or ()]


def blocks(message: Any) -> list[Any]:
    return [block.model_dump(exclude_none=True) for block in message.content]


def test_an_answer_is_a_message_streamed_or_not(served: Running, scripted: Scripted) -> None:
    says(scripted, ANSWER + END, [{"role": "system", "content": "Be brief."}, *ASKED])
    done = create(served, system="Be brief.")
    assert (done.type, done.role, done.model, done.stop_reason) == ("message", "assistant", MODEL, "end_turn")
    assert blocks(done) == [{"type": "text", "text": ANSWER}]
    assert (done.usage.output_tokens, done.usage.cache_creation_input_tokens) == (len(ANSWER) + 1, 0)
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    says(scripted, ANSWER + END, [{"role": "system", "content": "Be\n\nbrief."}, *ASKED])
    events, message = streamed(served, system=parts)
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 3
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert (message.content[0].text, message.stop_reason, message.id[:4]) == (ANSWER, "end_turn", "msg_")
    assert message.usage.output_tokens == len(ANSWER) + 1
    raw = post(served, stream=True).text
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw
    assert raw.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_an_answer_ends_at_a_stop_sequence_or_at_max_tokens(served: Running, scripted: Scripted) -> None:
    says(scripted, ANSWER + END)
    done = create(served, stop_sequences=["never", " 2"])
    assert (done.content[0].text, done.stop_reason, done.stop_sequence) == ("It costs", "stop_sequence", " 2")
    done = create(served, max_tokens=3)
    assert (done.content[0].text, done.stop_reason, done.stop_sequence) == ("It ", "max_tokens", None)
    _, message = streamed(served, stop_sequences=[" 2"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " 2")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_finds_the_whole_context(
    served: Running, scripted: Scripted, stream: bool
) -> None:
    written = f"Let me see.\n{CALL}\n{PEN}" + END
    first = prompt_of(scripted, ASKED, [CHAT_PRICE])
    after = [*ASKED, turn("Let me see.", "lamp", "pen"), result("23"), result("error: gone")]
    thanks = [*after, {"role": "user", "content": "Be brief."}]
    scripted.follow(first + written, prompt_of(scripted, thanks, [CHAT_PRICE]) + ANSWER + END)
    marked = PRICE | {"cache_control": {"type": "ephemeral"}}
    done = streamed(served, tools=[marked])[1] if stream else create(served, tools=[marked])
    text, lamp, pen = done.content
    assert (text.text.strip(), done.stop_reason) == ("Let me see.", "tool_use")
    assert [(call.type, call.name, call.input) for call in (lamp, pen)] == [
        ("tool_use", "price", {"item": item}) for item in ("lamp", "pen")
    ]
    assert lamp.id != pen.id
    usage, num_prompt = done.usage, len(scripted.tokenizer.encode(first))
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (num_prompt, 0)
    results = [
        {"type": "tool_result", "tool_use_id": lamp.id, "content": [{"type": "text", "text": "23"}]},
        {"type": "tool_result", "tool_use_id": pen.id, "content": "gone", "is_error": True},
        {"type": "text", "text": "Be brief."},
    ]
    messages = [*ASKED, done.to_param(), {"role": "user", "content": results}]
    answer = create(served, messages, tools=[PRICE])
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
    context = len(scripted.tokenizer.encode(first + written))
    assert answer.usage.cache_read_input_tokens >= context - 1
    prompt = len(scripted.tokenizer.encode(prompt_of(scripted, thanks, [CHAT_PRICE])))
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_that_would_leave_its_messages_with_the_server_sends_all(
    served: Running, scripted: Scripted, stream: bool
) -> None:
    def price(item: str) -> str:
        """The price of an item."""
        return "23"

    tool = beta_tool(price)
    declared: Any = tool.to_dict()
    function = {"name": "price", "description": declared["description"], "parameters": declared["input_schema"]}
    tools = [{"type": "function", "function": function}]
    before, after = (
        prompt_of(scripted, ASKED, tools),
        prompt_of(scripted, [*ASKED, turn("", "lamp"), result("23")], tools),
    )
    scripted.follow(before + CALL + END, after + ANSWER + END)
    with anthropic(served) as client:
        fields: Any = {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": [tool], "stream": stream}
        last = client.beta.messages.tool_runner(**fields).until_done()
    assert [block.text for block in last.content] == [ANSWER]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("1e400", "1e400"), ("[NaN, -Infinity]", ["NaN", "-Infinity"]), ('"a\\ud800"', "a?")],
    ids=["too large", "no number", "half a surrogate pair"],
)
def test_what_json_cannot_write_is_text_in_the_input_of_a_call(
    served: Running, scripted: Scripted, value: str, shown: Any
) -> None:
    says(scripted, CALL.replace('"lamp"', value) + END, tools=[CHAT_PRICE])
    assert create(served, tools=[PRICE]).content[0].input == {"item": shown}
    assert post(served, tools=[PRICE], max_tokens=200, stream=True).text.count("event: message_stop") == 1


def test_what_a_model_of_text_cannot_read_is_a_note_in_a_result_and_left_out_of_answers(
    served: Running, scripted: Scripted
) -> None:
    """Images and other blocks in results; calls and results of tools that Anthropic ran, in earlier answers."""
    read = "Seen:\n\n[image: it has no text]\n\n[hologram: it has no text]"
    says(scripted, ANSWER + END, [*ASKED, turn("Let me see. It is there.", "lamp"), result(read)])
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    image = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    others = [image, {"type": "hologram", "text": None}]
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "lamp"}}
    pages = [{"type": "web_search_result", "title": "Lamps", "url": "http://x", "encrypted_content": "x"}]
    answer = [
        {"type": "text", "text": "Let me see."},
        search,
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": pages},
        {"type": "text", "text": " It is there.", "citations": [{"type": "web_search_result_location"}]},
        {"type": "tool_use", "id": "x", "name": "price", "input": {"item": "lamp"}},
    ]
    seen = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "Seen:"}, *others]}
    messages = [*ASKED, {"role": "assistant", "content": answer}, {"role": "user", "content": [seen]}]
    done = create(served, messages)
    assert blocks(done) == [{"type": "text", "text": ANSWER}]


@pytest.mark.parametrize("in_result", [False, True])
def test_documents_and_search_results_that_are_text_are_read_with_their_titles(
    served: Running, scripted: Scripted, in_result: bool
) -> None:
    read = "See:\n\nNotes\n\nof May\n\nLamps are 23.\n\nPens\n\nare 3.\n\nInks\n\nhttp://x\n\nare 7.\n\nare blue."
    read += "\n\nNibs\n\nhttp://y\n\nare 1."
    marked = {"cache_control": {"type": "ephemeral"}, "citations": {"enabled": True}}
    texts = [{"type": "text", "text": text} for text in ("are 7.", "are blue.")]
    content: Any = [
        {"type": "text", "text": "See:"},
        {
            "type": "document",
            "title": "Notes",
            "context": "of May",
            "source": {"type": "text", "media_type": "text/plain", "data": "Lamps are 23."},
        }
        | marked,
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Pens"}]}},
        {"type": "document", "title": None, "source": {"type": "content", "content": "are 3."}},
        {"type": "search_result", "title": "Inks", "source": "http://x", "content": texts} | marked,
        {"type": "document", "text": "Nibs"},
        {"type": "search_result", "source": "http://y", "text": "are 1."},
    ]
    use = {"type": "tool_use", "id": "x", "name": "price", "input": {"item": "lamp"}}
    back = {"type": "tool_result", "tool_use_id": "x", "content": content}
    messages = [*ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}]
    says(scripted, ANSWER + END, [*ASKED, turn("", "lamp"), result(read)])
    if not in_result:
        messages = [{"role": "user", "content": content}]
        says(scripted, ANSWER + END, [{"role": "user", "content": read}])
    done = create(served, messages)
    assert blocks(done) == [{"type": "text", "text": ANSWER}]


def test_tools_that_anthropic_runs_are_left_out_and_its_search_defers_none(served: Running, scripted: Scripted) -> None:
    says(scripted, ANSWER + END, tools=[CHAT_PRICE])
    hosted = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "mcp_toolset", "mcp_server_name": "x"}]
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    tools: Any = [*hosted, PRICE | {"defer_loading": True}, search]
    assert blocks(create(served, tools=tools)) == [{"type": "text", "text": ANSWER}]


@pytest.mark.parametrize(
    ("kind", "arguments", "required"),
    [
        ("bash_20250124", ["command", "restart"], []),
        ("text_editor_20250728", ["command", "path", "file_text", "old_str", "new_str"], ["command", "path"]),
        ("memory_20250818", ["command", "path", "file_text", "old_str", "new_str"], ["command"]),
    ],
)
def test_tools_of_anthropic_that_the_client_runs_are_declared(
    served: Running, scripted: Scripted, kind: str, arguments: list[str], required: list[str]
) -> None:
    tools: Any = [{"type": kind, "name": "shell", "cache_control": {"type": "ephemeral"}, "max_characters": 99}]
    [function] = [tool["function"] for tool in declared(tools)]
    assert (function["name"], bool(function["description"])) == ("shell", True)
    schema = function["parameters"]
    assert [*schema["properties"]][: len(arguments)] == arguments
    assert schema["required"] == required
    written = CALL.replace("price", "shell").replace('"item": "lamp"', '"command": "ls"')
    says(scripted, written + END, tools=declared(tools))
    [call] = create(served, tools=tools).content
    assert (call.type, call.name, call.input) == ("tool_use", "shell", {"command": "ls"})


def test_a_whole_answer_is_the_one_that_its_stream_ends_with(served: Running, make_scripted: Make) -> None:
    """Texts before, between and behind calls are blocks of their own, in their order."""
    scripted = make_scripted(QWEN3)
    for written, cut, kinds in (
        (f"Let me see.\n{CALL}\nAnd pens?\n{PEN}\nWait.", 0, ["text", "tool_use", "text", "tool_use", "text"]),
        (f"<think>\nA lamp.\n</think>\n\nSo.\n{CALL}\n{PEN}", 0, ["thinking", "text", "tool_use", "tool_use"]),
        ("<think>a</think>b <think>c</think>d", 0, ["thinking", "text", "thinking", "text"]),
        (f"{CALL}<think>\na\n</think>\n{PEN}", 0, ["tool_use", "thinking", "tool_use"]),
        (CALL, 25, ["tool_use"]),
        (CALL.replace('{"item": "lamp"}', "7"), 0, ["tool_use"]),
        (" \n", 0, []),
    ):
        scripted.follow(prompt_of(scripted, ASKED, [CHAT_PRICE]) + written + END)
        length = {"tools": [PRICE], "max_tokens": len(written) + 1 - cut}
        whole = create(served, **length).to_dict()
        streaming = streamed(served, **length)[1].to_dict()
        assert whole["usage"]["output_tokens"] == streaming["usage"]["output_tokens"]
        for message in (whole, streaming):
            del message["id"], message["usage"]
            message["content"] = [{**block, "id": ""} for block in message["content"]]
        assert [block["type"] for block in whole["content"]] == kinds
        assert whole == {name: streaming.get(name) for name in whole}


def test_choices_none_and_one_at_a_time(served: Running, scripted: Scripted) -> None:
    says(scripted, f"{CALL}\n{PEN}" + END, tools=[CHAT_PRICE])
    done = create(served, tools=[PRICE], tool_choice={"type": "none"})
    assert [block.type for block in done.content] == ["text"]
    done = create(served, tools=[PRICE], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.input for block in done.content] == [{"item": "lamp"}]


def test_reasoning_is_a_block_with_a_signature_and_is_read_again(served: Running, make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3)
    written = f"<think>\nA lamp.\n</think>\n\nLet me see.\n{CALL}" + END
    first = prompt_of(scripted, ASKED, [CHAT_PRICE])
    after = [*ASKED, turn("Let me see.", "lamp") | {"reasoning_content": "A lamp."}, result("23")]
    scripted.follow(first + written, prompt_of(scripted, after, [CHAT_PRICE]) + ANSWER + END)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = create(served, tools=[PRICE], thinking=thinking)
    events, done = streamed(served, tools=[PRICE], thinking=thinking)
    assert [(block.type, getattr(block, "thinking", None)) for block in done.content] == [
        *[("thinking", "A lamp."), ("text", None), ("tool_use", None)]
    ]
    assert whole.content[0] == done.content[0]
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert kinds.count("signature_delta") == 1
    assert kinds.index("signature_delta") < kinds.index("text_delta")
    back = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": done.content[2].id, "content": "23"}]}
    answer = create(served, [*ASKED, done.to_param(), back], tools=[PRICE], thinking=thinking)
    assert answer.content[-1].text == ANSWER
    assert answer.usage.cache_read_input_tokens >= len(scripted.tokenizer.encode(first + written)) - 1
    says(scripted, ANSWER + END, chat_template_kwargs={"enable_thinking": False})
    assert blocks(create(served, thinking={"type": "disabled"})) == [{"type": "text", "text": ANSWER}]


def test_tokens_are_counted_as_the_prompt_has_them(served: Running, scripted: Scripted) -> None:
    prompt = prompt_of(scripted, [{"role": "system", "content": "Be brief."}, *ASKED], [CHAT_PRICE])
    with anthropic(served) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=ASKED, system="Be brief.", tools=[PRICE])
        assert counted.input_tokens == len(scripted.tokenizer.encode(prompt))
        long: Any = [{"role": "user", "content": "a" * 5000}]
        assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > served.service.max_model_len


def test_a_billing_header_in_the_system_prompt_is_left_out(served: Running, scripted: Scripted) -> None:
    says(scripted, ANSWER + END, [{"role": "system", "content": "Be brief."}, *ASKED])
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"}
    done = create(served, system=[billing, {"type": "text", "text": "Be brief."}])
    assert done.content[0].text == ANSWER


def test_a_deferred_tool_is_declared_where_a_result_refers_to_it(served: Running, scripted: Scripted) -> None:
    search = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    call = {"id": "1", "function": {"name": "search", "arguments": {}}}
    reply = {"role": "tool", "tool_call_id": "1", "name": "search", "content": json.dumps(CHAT_PRICE)}
    says(scripted, CALL + END, [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, reply], [search])
    use = {"type": "tool_use", "id": "1", "name": "search", "input": {}}
    reference = {"type": "tool_reference", "tool_name": "price"}
    back = {"type": "tool_result", "tool_use_id": "1", "content": [reference]}
    done = create(
        served,
        [*ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}],
        tools=[{"name": "search", "input_schema": {"type": "object"}}, PRICE | {"defer_loading": True}],
        thinking={"type": "adaptive", "display": "updates"},
    )
    assert (done.content[0].name, done.content[0].input) == ("price", {"item": "lamp"})


def test_a_deferred_tool_is_called_as_its_schema_says(served: Running, make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3_CODER)
    schema = {"type": "object", "properties": {"number": {"type": "integer"}}}
    declared = {"type": "function", "function": {"name": "count", "parameters": schema}}
    search: Any = {"id": "1", "function": {"name": "search", "arguments": {}}}
    reply = {"role": "tool", "tool_call_id": "1", "name": "search", "content": json.dumps(declared)}
    use = {"type": "tool_use", "id": "1", "name": "search", "input": {}}
    back = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "count"}]}
    messages = [*ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}]
    tools = [{"name": "count", "input_schema": schema, "defer_loading": True}]
    by_itself, has_to = "<parameter=number>\n3\n</parameter>", '{"number": 3}'
    for choice, written in (({"type": "auto"}, by_itself), ({"type": "tool", "name": "count"}, has_to)):
        call = f"<tool_call>\n<function=count>\n{written}\n</function>\n</tool_call>"
        says(scripted, call + END, [*ASKED, {"role": "assistant", "content": "", "tool_calls": [search]}, reply])
        assert create(served, messages, tools=tools, tool_choice=choice).content[0].input == {"number": 3}


def test_models_are_listed_as_anthropic_does(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with anthropic(served) as client:
        [model] = client.models.list().data
        assert (model.id, model.display_name, model.max_tokens) == (MODEL, MODEL, served.service.max_model_len)
        assert client.models.retrieve(MODEL).created_at.timestamp() == served.service.created
        names = [f"model-{number}" for number in range(5)]
        monkeypatch.setattr(served.service, "names", tuple(names))
        assert [model.id for model in client.models.list()] == names
        page = client.models.list(limit=2)
        assert (page.has_more, page.first_id, page.last_id) == (False, names[0], names[-1])
    [card, *_] = served.client.models.list().data
    assert card.model_dump()["context_length"] == served.service.max_model_len
