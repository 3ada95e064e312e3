"""Chats through templates with the traits of published ones: calls in their formats, their ids, what goes back."""

import json
import re
from typing import Any

import pytest

from jinfercept.outputs import CompletionOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.chat_templates import MISTRAL_SMALL, MISTRAL_V3, PLAIN, QWEN, QWEN3_CODER
from tests.support.scripted_model import Make, Scripted

GREEDY = SamplingParams(temperature=0.0, max_tokens=500)
QUESTION = [{"role": "user", "content": "Two lamps?"}]
NEXT = "<|im_end|>\n<|im_start|>assistant\n"


def price(item: str, number: int, exact: bool = False) -> str:
    """The price of some of an item."""
    assert type(number) is int
    return f"{23 * number} for {item}"


def answered(scripted: Scripted, *written: str, messages: Any = QUESTION, **options: Any) -> list[CompletionOutput]:
    """The outputs of a model that writes, and reads, these texts behind the prompt; they are all alike."""
    tools = options.pop("tools", [price])
    prompt = prompt_of(scripted, messages, tools)
    scripted.follow(prompt + "".join(written))
    params = options.pop("params", GREEDY)
    [output] = scripted.llm.chat(messages, params, tools=tools, **options)
    for completion in output.outputs:
        assert scripted.tokenizer.decode(completion.token_ids, skip_special_tokens=False) == "".join(written)
    return output.outputs


def prompt_of(scripted: Scripted, messages: Any, tools: Any = (price,)) -> str:
    scripted.follow()
    [output] = scripted.llm.chat(messages, SamplingParams(max_tokens=1, temperature=0.0), tools=tools)
    assert output.prompt is not None
    return output.prompt


def test_qwen3_coder_calls_in_xml_with_values_as_the_function_declares_them(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3_CODER)
    call = (
        "<tool_call>\n<function=price>\n<parameter=item>\n12\n</parameter>\n<parameter=number>\n2\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
    )
    read = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n46 for 12\n</tool_response>\n{NEXT}"
    [completion] = answered(scripted, call, read, "46.", "<|im_end|>")
    called, returned, answer = completion.messages
    arguments = json.loads(called["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"item": "12", "number": 2, "exact": True}
    assert (returned["content"], answer["content"]) == ("46 for 12", "46.")
    again = prompt_of(scripted, [*QUESTION, *completion.messages, *QUESTION])
    assert "<parameter=item>\n12\n</parameter>\n<parameter=number>\n2\n</parameter>\n" in again


def test_a_coder_that_leaves_the_tags_out_calls_all_the_same(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    call = '```json\n{"name": "price", "arguments": {"item": "lamp", "number": 2}}\n```'
    read = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n46 for lamp\n</tool_response>{NEXT}"
    [completion] = answered(scripted, "I will look.\n" + call, read, '```json\n{"name": "lamp"}\n```', "<|im_end|>")
    called, _, answer = completion.messages
    assert (called["content"], len(called["tool_calls"])) == ("I will look.", 1)
    assert answer == {"role": "assistant", "content": '```json\n{"name": "lamp"}\n```'}


def test_mistral_7b_gets_ids_that_its_template_takes_though_the_model_writes_none(make_scripted: Make) -> None:
    scripted = make_scripted(MISTRAL_V3)
    prompt = prompt_of(scripted, QUESTION)
    call = '[TOOL_CALLS] [{"name": "price", "arguments": {"item": "lamp", "number": 2}}]'
    scripted.follow(prompt + call + "</s>")
    [output] = scripted.llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=200), tools=[price])
    [completion] = output.outputs
    called, returned = completion.messages[:2]
    call_id = called["tool_calls"][0]["id"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", call_id)
    start, end = completion.interceptions[0].span
    read = scripted.tokenizer.decode(completion.token_ids[start:end], skip_special_tokens=False)
    assert read == f'[TOOL_RESULTS] {{"content": 46 for lamp, "call_id": "{call_id}"}}[/TOOL_RESULTS]'
    again = [*QUESTION, called, returned, {"role": "assistant", "content": "46."}, *QUESTION]
    assert f'"id": "{call_id}"}}]</s>[TOOL_RESULTS]' in prompt_of(scripted, again)


def test_mistral_small_calls_with_ids_of_its_own(make_scripted: Make) -> None:
    scripted = make_scripted(MISTRAL_SMALL)
    first_call, second_call = (
        f'[TOOL_CALLS]price[CALL_ID]{call_id}[ARGS]{{"item": "lamp", "number": {number}}}'
        for call_id, number in (("aBc12dEf3", 1), ("Zz9999999", 2))
    )
    read = "".join(
        f"[TOOL_RESULTS]{call_id}[TOOL_CONTENT]{price} for lamp[/TOOL_RESULTS]"
        for call_id, price in (("aBc12dEf3", 23), ("Zz9999999", 46))
    )
    [completion] = answered(scripted, first_call + second_call, "</s>" + read, "23, 46.", "</s>")
    called, first, second, _ = completion.messages
    assert [call["id"] for call in called["tool_calls"]] == ["aBc12dEf3", "Zz9999999"]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["aBc12dEf3", "Zz9999999"]


def test_every_one_of_several_outputs_runs_its_own_calls(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    ran: list[str] = []

    def buy(item: str) -> str:
        """Buys an item."""
        ran.append(item)
        return "bought"

    params = SamplingParams(temperature=1.0, max_tokens=400, n=3, seed=1)
    call = '<tool_call>\n{"name": "buy", "arguments": {"item": "lamp"}}\n</tool_call>'
    read = f"<|im_end|>\n<|im_start|>user\n<tool_response>\nbought\n</tool_response>{NEXT}"
    completions = answered(scripted, call, read, "Done.", "<|im_end|>", params=params, tools=[buy])
    assert ran == ["lamp"] * 3
    assert [completion.index for completion in completions] == [0, 1, 2]
    assert len({completion.messages[0]["tool_calls"][0]["id"] for completion in completions}) == 3
    for completion in completions:
        called, returned, answer = completion.messages
        assert returned["tool_call_id"] == called["tool_calls"][0]["id"] == completion.interceptions[0].calls[0].id
        assert answer["content"] == "Done."


def test_every_one_of_several_outputs_may_end_in_calls_for_the_caller(make_scripted: Make) -> None:
    declared = {"name": "buy", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}
    params = SamplingParams(temperature=1.0, max_tokens=400, n=2, seed=1)
    call = '<tool_call>\n{"name": "buy", "arguments": {"item": "lamp"}}\n</tool_call>'
    completions = answered(make_scripted(QWEN), call, "<|im_end|>", params=params, tools=[declared])
    assert [completion.finish_reason for completion in completions] == ["tool_calls"] * 2
    assert len({completion.messages[-1]["tool_calls"][0]["id"] for completion in completions}) == 2


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_answers_in_the_structure_that_is_asked_for(make_scripted: Make, n: int) -> None:
    scripted = make_scripted(PLAIN)
    constraint = StructuredOutputsParams(json={"properties": {"price": {"enum": [23]}}, "required": ["price"]})
    params = SamplingParams(temperature=float(n > 1), max_tokens=60, structured_outputs=constraint, n=n, seed=1)
    scripted.follow(prompt_of(scripted, QUESTION, ()) + '{"price": 23}<|im_end|>')
    [output] = scripted.llm.chat(QUESTION, params)
    assert [completion.messages for completion in output.outputs] == [
        ({"role": "assistant", "content": '{"price": 23}'},)
    ] * n
    assert [completion.finish_reason for completion in output.outputs] == ["stop"] * n


def test_a_turn_may_have_to_be_a_call_or_a_structured_answer(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    call = (
        r'"<tool_call>\n{\"name\": \"price\", \"arguments\": " %json {"required": ["item", "number"]} "}\n</tool_call>"'
    )
    grammar = f'start: call | answer\ncall: {call}\nanswer: %json {{"properties": {{"price": {{"type": "integer"}}}}}}'
    params = SamplingParams(
        temperature=0.0, max_tokens=400, structured_outputs=StructuredOutputsParams(grammar=grammar)
    )
    called = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp", "number": 2}}\n</tool_call>'
    read = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n46 for lamp\n</tool_response>{NEXT}"
    [completion] = answered(scripted, called, read, '{"price": 46}', "<|im_end|>", params=params)
    assert completion.messages[-1]["content"] == '{"price": 46}'
    assert completion.interceptions[0].results[0].status == "ok"
