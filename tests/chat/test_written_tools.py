"""Chats with tools whose template knows none: declarations, calls and results are text."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jinfercept.chat.chats import ChatPlan
from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.memory import ChatMemory
from jinfercept.chat.options import ChatOptions
from jinfercept.errors import RequestError
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.chat_templates import PLAIN, QWEN
from tests.support.live_server import END, prompt_of
from tests.support.responses import CALL, CHAT_PRICE
from tests.support.scripted_model import Make

ALTERNATING = """\
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QUESTION: list[Any] = [{"role": "user", "content": "How much is a lamp?"}]
NAMED = {"type": "function", "function": {"name": "price"}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
TEMPLATES = pytest.mark.parametrize("template", [PLAIN, ALTERNATING], ids=["any role", "three roles"])


def price(item: str) -> str:
    """The price of an item."""
    return f"{item}: 23"


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "price", "arguments": json.dumps(arguments)}}


@TEMPLATES
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_the_declared_schemas_stand_in_a_system_message_and_a_tool_is_called(
    make_scripted: Make, template: str, choice: Any
) -> None:
    scripted = make_scripted(template)
    options: Any = {"tool_choice": choice, "parallel_tool_calls": False}
    prompt = prompt_of(scripted, [{"role": "system", "content": "Be brief."}, *QUESTION], [CHAT_PRICE], **options)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(CHAT_PRICE) in prompt
    scripted.follow(prompt_of(scripted, QUESTION, [CHAT_PRICE], **options) + CALL + END)
    [output] = scripted.llm.chat(QUESTION, GREEDY, tools=[CHAT_PRICE], **options)
    [completion] = output.outputs
    assert completion.finish_reason == "tool_calls"
    [call] = completion.messages[-1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"item": "lamp"}


@TEMPLATES
def test_the_follow_up_begins_with_the_context_of_the_call(make_scripted: Make, template: str) -> None:
    scripted = make_scripted(template)
    before = prompt_of(scripted, QUESTION, [CHAT_PRICE], tool_choice="required") + CALL + END
    answer = {"role": "assistant", "content": "", "tool_calls": [called({"item": "lamp"}), called({"item": "pen"})]}
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("23", "4")]
    messages = [*QUESTION, answer | {"tool_calls": answer["tool_calls"][:1]}, results[0]]
    for choice in ("none", "required"):
        assert prompt_of(scripted, messages, [CHAT_PRICE], tool_choice=choice).startswith(before)
    both = prompt_of(scripted, [*QUESTION, answer, *results], [CHAT_PRICE], tool_choice="none")
    response = "<tool_response>\n23\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    pen = CALL.replace("lamp", "pen")
    assert f"assistant\n{CALL}\n{pen}{END}\n<|im_start|>user\n{response}{END}\n" in both


def test_a_call_is_as_its_schema_says_where_that_can_be_enforced(make_scripted: Make) -> None:
    scripted = make_scripted(PLAIN)
    strange = {"name": "strange", "parameters": {"properties": {"x": {"not": {"type": "string"}}}}}
    tools: list[Any] = [price, strange, {"name": "a\nb"}]
    before = prompt_of(scripted, QUESTION, tools)

    def calls(written: str, **options: Any) -> list[tuple[str, str]]:
        scripted.follow(before + written)
        [output] = scripted.llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=90), tools=tools, **options)
        message = output.outputs[0].messages[0]
        return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]

    [(name, arguments)] = calls(CALL.replace('"lamp"', "7 or more"), max_rounds=0)
    assert name == "price"
    assert arguments.startswith('{"item": "')
    assert calls(CALL.replace("price", "strange") + END, max_rounds=0) == [("strange", '{"item": "lamp"}')]
    assert not calls(CALL + END, tool_choice="none")
    [output] = scripted.llm.chat(
        QUESTION, SamplingParams(temperature=0, max_tokens=20), tools=tools, tool_choice="none"
    )
    assert "<tool_call>" not in output.outputs[0].text
    assert not output.outputs[0].text.lstrip().startswith("<"), "the beginning of a call"
    wanted = StructuredOutputsParams(choice=["23", "46"])
    [output] = scripted.llm.chat(QUESTION, replace(GREEDY, structured_outputs=wanted), tools=tools)
    assert output.outputs[0].messages[-1]["content"] in ("23", "46")
    [output] = scripted.llm.chat(QUESTION, replace(GREEDY, max_tokens=5, ignore_eos=True), tools=tools)
    assert output.outputs[0].finish_reason == "length"


def test_a_bias_of_calls_is_on_the_token_that_opens_one_where_the_model_may_answer(make_scripted: Make) -> None:
    tokenizer = make_scripted(PLAIN).llm.tokenizer
    assert tokenizer is not None
    opening = tokenizer.encode("<tool_call>")[0]

    def biases(choice: Any, own: dict[int, float] | None = None) -> Any:
        params, options = SamplingParams(logit_bias=own), ChatOptions(tool_choice=choice)
        plan = ChatPlan(chat_tools([price]), options, tokenizer, None, ())
        [request] = plan.requests(["a chat"], [QUESTION], ChatMemory(), params, call_bias=-3.0)
        return request.params.logit_bias

    assert biases("auto") == {opening: -3.0}
    assert biases("auto", {5: 1.0}) == {5: 1.0, opening: -3.0}
    assert biases("auto", {opening: 1.0}) == {opening: 1.0}
    assert biases("required") is None
    assert biases("none") is None


def test_the_log_says_once_that_the_template_knows_no_tools(
    make_scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_scripted(PLAIN).llm
    llm._requests._note_written_tools.cache_clear()  # pyright: ignore[reportPrivateUsage]
    for choice in ("auto", "required", "none"):
        llm.make_chats([QUESTION], None, [price], {"tool_choice": choice})
    [record] = [record for record in caplog.records if record.name == "jinfercept.chat.written_tools"]
    assert "knows no tools" in record.message


def test_other_formats_are_left_to_the_template(make_scripted: Make) -> None:
    scripted = make_scripted(PLAIN)
    for choice in ("auto", "required"):
        named = prompt_of(scripted, QUESTION, [price], tool_choice=choice, tool_call_parser="pythonic")
        assert named == prompt_of(scripted, QUESTION)
    scripted = make_scripted(PLAIN + "{% if tools %}{{ tools | tojson }}{% endif %}")
    for choice in ("auto", "required"):
        with pytest.raises(RequestError, match="the chat template uses no known format of tool calls"):
            scripted.llm.chat(QUESTION, GREEDY, tools=[price], tool_choice=choice)
    scripted = make_scripted(QWEN)
    free, forced = (prompt_of(scripted, QUESTION, [price], tool_choice=choice) for choice in ("auto", "required"))
    assert free == forced


def test_tools_stand_in_the_users_turn_where_a_template_refuses_the_system(make_scripted: Make) -> None:
    refuses = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    scripted = make_scripted(refuses + ALTERNATING)
    prompt = prompt_of(scripted, QUESTION, [price])
    assert prompt.startswith("<|im_start|>user\n<system>\n# Tools\n")
    assert prompt.endswith(f"</system>\n\n{QUESTION[0]['content']}{END}\n<|im_start|>assistant\n")
    scripted.follow(
        prompt + CALL + END + f"\n<|im_start|>user\n<tool_response>\nlamp: 23\n</tool_response>{END}\n"
        "<|im_start|>assistant\nIt is 23." + END
    )
    [output] = scripted.llm.chat(QUESTION, GREEDY, tools=[price])
    assert output.outputs[0].messages[-1]["content"] == "It is 23."
