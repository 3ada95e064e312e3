"""Chats on a scripted model: rendering, rounds, results, limits and refusals."""

import json
import re
import sys
from typing import Any

import pytest

from jinfercept.calls import Tool
from jinfercept.chat.messages import results_behind_calls
from jinfercept.errors import ModelError, RequestError
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from tests.support.chat_templates import HARMONY, LLAMA, PLAIN, QWEN, QWEN_ITEMS, QWEN_TEXT, THINKING
from tests.support.engine_state import engine_state
from tests.support.scripted_model import Make, Scripted

GREEDY = SamplingParams(temperature=0.0, max_tokens=400)
SHORT = SamplingParams(temperature=0.0, max_tokens=100)
QUESTION = [{"role": "user", "content": "How much is a lamp?"}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
NEXT = "<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


def price(item: str) -> str:
    """The price of an item.

    Args:
        item: what is sold
    """
    return {"lamp": "23", "pen": "3"}[item]


def result(text: str) -> str:
    """How `QWEN` writes one result after a turn with calls."""
    return f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response>{NEXT}"


def ask(
    scripted: Scripted, *written: str, tools: Any = (price,), messages: Any = QUESTION, **more: Any
) -> RequestOutput:
    """Chat with a model that writes, and reads, these texts after the prompt."""
    options = dict(more)
    params = options.pop("params", GREEDY)
    prompt = prompt_of(scripted, messages, tools, **options)
    scripted.follow(prompt + "".join(written))
    [output] = scripted.llm.chat(messages, params, tools=tools, **options)
    assert output.prompt == prompt
    return output


def prompt_of(scripted: Scripted, messages: Any, tools: Any, **options: Any) -> str:
    """The prompt as a chat that ends at once renders it."""
    scripted.follow()
    [output] = scripted.llm.chat(messages, SamplingParams(max_tokens=1, temperature=0.0), tools=tools, **options)
    assert output.prompt is not None
    return output.prompt


def stream_text(scripted: Scripted, output: RequestOutput) -> str:
    return scripted.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=False)


def test_a_chat_calls_reads_and_answers(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    written = [CALL, result("23"), "It costs 23.", END]
    output = ask(scripted, *written)
    completion = output.outputs[0]
    assert stream_text(scripted, output) == "".join(written)
    assert completion.finish_reason == "stop"
    assert completion.text.startswith("<tool_call>")
    called, returned, answer = completion.messages
    assert answer == {"role": "assistant", "content": "It costs 23."}
    assert called["content"] == ""
    assert called["tool_calls"][0]["function"] == {"name": "price", "arguments": '{"item": "lamp"}'}
    assert returned == {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "name": "price",
        "content": "23",
    }
    [pause] = output.interceptions
    assert pause.calls[0].id == called["tool_calls"][0]["id"]
    assert pause.results[0].text == "23"
    assert pause.context is not None
    assert sum(pause.context) > 0


def test_calls_of_one_turn_run_together_and_rounds_follow_each_other(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    pen = CALL.replace("lamp", "pen")
    both = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n23\n</tool_response>\n<tool_response>\n3\n</tool_response>{NEXT}"
    output = ask(scripted, CALL + "\n" + pen, both, pen, result("3"), "26 and 3.", END)
    assert [len(pause.calls) for pause in output.interceptions] == [2, 1]
    assert [message["role"] for message in output.outputs[0].messages] == [
        *("assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]
    ids = [call["id"] for message in output.outputs[0].messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3


def test_a_template_that_rewrites_the_turn_leaves_the_stream_as_it_was(make_scripted: Make) -> None:
    scripted = make_scripted(THINKING)
    written = ["<think>\nprices?\n</think>\n" + CALL, result("23"), "<think>\n</think>\n23.", END]
    output = ask(scripted, *written)
    assert stream_text(scripted, output) == "".join(written)


def test_what_the_template_reads_besides_reaches_every_turn(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    written = [CALL, result("23") + "<think></think>", "23.", END]
    output = ask(scripted, *written, chat_template_kwargs={"enable_thinking": False})
    assert stream_text(scripted, output) == "".join(written)
    assert output.outputs[0].messages[-1]["content"] == "23."


def test_llama_takes_results_as_json_and_several_calls_though_its_template_shows_one(make_scripted: Make) -> None:
    scripted = make_scripted(LLAMA)
    calls = '{"name": "price", "parameters": {"item": "lamp"}}; {"name": "price", "parameters": {"item": "sofa"}}'
    header = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    error = json.dumps("error: KeyError: 'sofa'")
    read = f'<|eot_id|>{header}"23"<|eot_id|>{header}{error}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    output = ask(scripted, calls, read, "A lamp is 23.", "<|eot_id|>")
    assert stream_text(scripted, output) == calls + read + "A lamp is 23.<|eot_id|>"
    assert [outcome.status for outcome in output.interceptions[0].results] == ["ok", "error"]
    assert output.outputs[0].messages[-1]["content"] == "A lamp is 23."
    again = prompt_of(scripted, [*QUESTION, *output.outputs[0].messages, *QUESTION], [price])
    assert again.index('"lamp"}') < again.index(f'{header}"23"') < again.index('"sofa"}') < again.index(error)


def test_a_long_result_is_cut_within_its_message(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)

    def much(item: str) -> str:
        """A lot."""
        return item * 1000

    call = CALL.replace("price", "much")
    output = ask(scripted, call, END, tools=[Tool(much, max_result_tokens=100)], params=SHORT)
    start, end = output.interceptions[0].span
    returned = scripted.tokenizer.decode(output.outputs[0].token_ids[start:end], skip_special_tokens=False)
    assert re.fullmatch(
        r"<\|im_end\|>\n<\|im_start\|>user\n<tool_response>\n(lamp)+.* \.\.\. \(cut: longer than 100 tokens\)\n"
        r"</tool_response><\|im_end\|>\n<\|im_start\|>assistant\n",
        "<|im_end|>" + returned,
    )
    assert output.interceptions[0].results[0].status == "too_large"
    assert len(output.interceptions[0].results[0].text) == 100


def test_a_result_that_fills_the_window_leaves_the_template_whole(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)

    def much(item: str) -> str:
        """A lot."""
        return item * 1000

    output = ask(scripted, CALL.replace("price", "much"), END, tools=[Tool(much, max_result_tokens=10_000)])
    start, end = output.interceptions[0].span
    returned = scripted.tokenizer.decode(output.outputs[0].token_ids[start:end], skip_special_tokens=False)
    assert returned.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ('{"item": lamp}', "not JSON"),
        ('["lamp"]', "no object"),
        ("{}", "item: Missing required argument"),
        ('{"item": "lamp", "colour": "red"}', "colour: Unexpected keyword argument"),
        ('{"item": "sofa"}', "KeyError: 'sofa'"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_that_the_model_reads(
    make_scripted: Make, arguments: str, complaint: str
) -> None:
    scripted = make_scripted(QWEN)
    call = f'<tool_call>\n{{"name": "price", "arguments": {arguments}}}\n</tool_call>'
    output = ask(scripted, call, END, params=SHORT)
    [returned] = output.interceptions[0].results
    assert complaint in returned.text
    assert returned.status == "error"
    assert complaint in output.outputs[0].messages[1]["content"]


def test_a_tool_that_there_is_not_is_an_error_that_the_model_reads(make_scripted: Make) -> None:
    output = ask(make_scripted(QWEN), CALL.replace("price", "cost"), END, params=SHORT)
    assert "no tool 'cost' (there are: price)" in output.outputs[0].messages[1]["content"]


def test_after_the_last_round_no_more_calls_are_run(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    ran: list[str] = []

    def price(item: str) -> str:
        """The price of an item."""
        ran.append(item)
        return "23"

    output = ask(scripted, CALL, result("23"), CALL, END, tools=[price], max_rounds=1)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("tool_calls", "max_rounds")
    assert completion.messages[-1]["tool_calls"][0]["function"]["name"] == "price"
    assert ran == ["lamp"]
    assert len(output.interceptions) == 1


def test_conversations_without_tools_are_answered_together(make_scripted: Make) -> None:
    scripted = make_scripted(PLAIN)
    conversations = [[{"role": "user", "content": text}] for text in ("Hi", "Good morning")]
    prompts = [prompt_of(scripted, conversation, ()) for conversation in conversations]
    scripted.follow(*(prompt + f"{prompt[17]}!" + END for prompt in prompts))
    outputs = scripted.llm.chat(conversations, GREEDY)
    assert [output.outputs[0].messages for output in outputs] == [
        ({"role": "assistant", "content": f"{prompt[17]}!"},) for prompt in prompts
    ]
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]


def test_text_that_stands_in_markup_is_read_without_tools(make_scripted: Make) -> None:
    scripted = make_scripted(HARMONY)
    thought, answer = "<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant<|channel|>final<|message|>Hi!"
    output = ask(scripted, thought, answer, END, tools=())
    assert output.outputs[0].messages == ({"role": "assistant", "content": "Hi!", "reasoning_content": "Hm."},)


def test_what_cannot_be_a_chat_says_what_got_and_fix(make_scripted: Make) -> None:
    scripted = make_scripted(PLAIN)
    chat: Any = scripted.llm.chat

    def positional(item: str, /) -> str:
        """Takes no names."""
        return item

    def strange(item: Make) -> str:
        """Takes something that JSON has not."""
        return str(item)

    for call, match in (
        (lambda: chat("Hi"), "list of messages"),
        (lambda: chat([]), "list of messages.*got \\[\\]"),
        (lambda: chat([[]]), "list of messages"),
        (lambda: chat([{"role": "usr", "content": "Hi"}]), "one of system, .*got 'usr' \\(did you mean 'user'"),
        (lambda: chat([{"role": "user"}]), "role user has content"),
        (lambda: chat([{"role": "user", "content": 3}]), "content is text"),
        (
            lambda: chat([{"role": "assistant", "reasoning": 5}, {"role": "user", "content": "a"}]),
            "reasoning is text; got 5",
        ),
        (
            lambda: chat(QUESTION, tools=[price], chat_template="{{ tools }}"),
            "the chat template uses no known format of tool calls",
        ),
        (lambda: chat(QUESTION, tools=price), "tools is a list"),
        (lambda: chat(QUESTION, tools=[price, price]), "one name"),
        (lambda: chat(QUESTION, tools=[3]), "not a tool"),
        (lambda: chat(QUESTION, tools=[{"parameters": {}}]), "the declaration of a tool must have a name"),
        (lambda: chat(QUESTION, tools=[positional]), "names of its arguments"),
        (lambda: chat(QUESTION, tools=[strange]), "no JSON schema"),
        (lambda: chat(QUESTION, max_rounds=-1), "max_rounds"),
        (lambda: chat(QUESTION, max_turns=1), "no such option"),
        (lambda: chat(QUESTION, chat_template_kwargs={"tools": []}), "chat_template_kwargs"),
        (lambda: chat(QUESTION, tools=[price], tool_call_parser="xml"), "no such tool_call_parser"),
        (
            lambda: chat(QUESTION, tools=[{"name": "f", "parameters": 5}]),
            "parameters of tool 'f' are not a JSON schema",
        ),
        (lambda: chat(QUESTION, chat_template="{{ nothing.at.all }}"), "chat_template that was given fails.*at"),
        (lambda: chat(QUESTION, chat_template="a\n{% for %}"), "chat_template that was given fails.*line 2: Expected"),
        (lambda: chat(QUESTION, chat_template="{{ raise_exception('no!') }}"), "chat_template that was given.*no!"),
        (lambda: chat(QUESTION, chat_template=7), "chat_template is Jinja source; got 7"),
        (lambda: chat(QUESTION, tools=[price], tool_call_parser="hermes", chat_template="{{ 1 }}"), "no place"),
    ):
        with pytest.raises(RequestError, match=match):
            call()
    with pytest.raises(ModelError, match="no chat template"):
        make_scripted(None).llm.chat(QUESTION)
    assert not engine_state(scripted.llm).has_work


def test_a_plain_template_serves_tools_when_their_format_is_named(make_scripted: Make) -> None:
    scripted = make_scripted(PLAIN)
    read = f"<|im_end|>\n<|im_start|>tool\n23{NEXT}"
    output = ask(scripted, CALL, read, "23.", END, tool_call_parser="hermes")
    assert stream_text(scripted, output) == CALL + read + "23." + END


@pytest.mark.parametrize("template", [QWEN, QWEN_ITEMS, QWEN_TEXT, LLAMA], ids=["json", "items", "text", "one call"])
def test_a_conversation_goes_on_whatever_its_calls_have_as_arguments(make_scripted: Make, template: str) -> None:
    scripted = make_scripted(template)
    texts = [
        '{"a": ',
        "[]",
        "null",
        '"R"',
        "",
        "7",
        '{"a": "\\ud83d"}',
        "{'a': 1}",
        "[" * 5000,
        '{"item": "lamp"}',
        None,
    ]
    for arguments in [[text] for text in texts] + [texts]:
        calls = [
            {"id": str(index), "type": "function", "function": {"name": "price", "arguments": text}}
            for index, text in enumerate(arguments)
        ]
        answer = {"role": "assistant", "content": None, "tool_calls": calls}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "no object"} for call in calls]
        [request] = scripted.llm.make_chats([[*QUESTION, answer, *results]], None, [price], {})
        assert request.prompt is not None
        assert request.prompt.count("no object") == len(calls)
        if arguments == texts[:1]:
            shown = {QWEN_ITEMS: r'arguments="{\"a\": "', QWEN_TEXT: '"arguments": {"a": }'}
            assert shown.get(template, "") in request.prompt


IDS = "{% for m in messages %}{{ m.role[0] }}{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}"
IDS += "{{ m.tool_call_id }}{{ m.name }} {% endfor %}"


def short(text: str) -> list[dict[str, Any]]:
    """Messages by the first letters of their roles, with the ids of calls; a result may have the name of its call instead."""
    messages: list[dict[str, Any]] = []
    for letter, *marks in text.split():
        role = next(role for role in ("system", "user", "assistant", "tool") if role[0] == letter)
        message: dict[str, Any] = {"role": role, "content": "?"}
        if role == "assistant" and marks:
            functions = [{"name": f"f{mark}", "arguments": "{}"} for mark in marks]
            message["tool_calls"] = [{"id": mark, "function": f} for mark, f in zip(marks, functions, strict=True)]
        elif marks:
            message["name" if marks[0] == "f" else "tool_call_id"] = "".join(marks)
        messages.append(message)
    return messages


def test_results_stand_behind_the_calls_of_their_turn_wherever_they_are_given(make_scripted: Make) -> None:
    scripted = make_scripted(IDS)
    for given, read in (
        ("u a12 t2 t1", "u a12 t1 t2"),
        ("u a1 u t1", "u a1 t1 u"),
        ("u a12 u t2 u t1 u", "u a12 t1 t2 u u u"),
        ("u a123 u t3 t1", "u a123 t1 t3 u"),  # one call has no result yet
        ("u a12 t2 t1 u a21 u t1 t2", "u a12 t1 t2 u a21 t2 t1 u"),  # a client that numbers the calls of each turn
        ("u a1 u a1 t1", "u a1 u a1 t1"),
        ("u a11 u t1 t1", "u a11 t1 t1 u"),
        ("u a1 a2 t1 t2", "u a1 t1 a2 t2"),
        ("u a1 u a t1", "u a1 t1 u a"),
        ("u a1 t1 a t1", "u a1 t1 a t1"),  # the late result of a future
        ("u a12 u t1 t2 t1", "u a12 t1 t1 t2 u"),
        ("u a12 t3 t2 t1", "u a12 t1 t2 t3"),
        ("u t9 a1 t1", "u t9 a1 t1"),
        ("u a12 u t t", "u a12 t t u"),
        ("u a12 u t2 t", "u a12 t t2 u"),
        ("u a12 u tf2 tf1", "u a12 tf1 tf2 u"),
    ):
        [request] = scripted.llm.make_chats([short(given)], None, (), {})
        assert request.prompt == f"{read} ", given


def test_results_find_their_calls_at_once_however_many_there_are() -> None:
    looked_up: list[str] = []
    given = short(f"u a{'1' * 500} a2 " + "t1 " * 1000 + "t9 " * 1000 + "t " * 1000)
    sys.setprofile(lambda _, event, called: looked_up.append(called.__name__) if event == "c_call" else None)
    try:
        results_behind_calls(given)
    finally:
        sys.setprofile(None)
    assert looked_up.count("popleft") + looked_up.count("append") < 10_000


def test_tools_that_were_read_before_are_not_read_again_unless_they_have_changed(make_scripted: Make) -> None:
    llm = make_scripted(QWEN).llm
    item = {"type": "string", "description": "a desk"}
    tool = {"name": "buy", "parameters": {"type": "object", "properties": {"item": item}}}
    first, again = (llm.make_chats([QUESTION], None, [tool], {})[0] for _ in range(2))
    [other] = llm.make_chats([QUESTION], None, [tool], {}, tenant="another")
    assert again.render is first.render
    assert other.render is not first.render, "the time of a reply would tell what another tenant has sent"
    item["description"] = "a pen"
    [changed] = llm.make_chats([QUESTION], None, [tool], {})
    assert first.prompt is not None
    assert changed.prompt == first.prompt.replace("a desk", "a pen")
    item["description"] = "a desk"
    [back] = llm.make_chats([QUESTION], None, [tool], {})
    assert (back.prompt, back.render) == (first.prompt, first.render)
    [none] = llm.make_chats([QUESTION], None, [tool], {"tool_choice": "none", "max_rounds": 1})
    assert none.render is not first.render
