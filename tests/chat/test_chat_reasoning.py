"""Chats with models that reason first: reasoning in messages, in streams and in later prompts."""

from typing import Any

import pytest

from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.chat_templates import QWEN3, QWEN3_OPENED
from tests.support.scripted_model import Make, Scripted

GREEDY = SamplingParams(temperature=0.0, max_tokens=400)
QUESTION = [{"role": "user", "content": "How much is a lamp?"}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
READ = "<|im_end|>\n<|im_start|>user\n<tool_response>\n23\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
JSON = StructuredOutputsParams(
    json={"properties": {"price": {"type": "integer"}}, "required": ["price"], "additionalProperties": False}
)


def price(item: str) -> str:
    """The price of an item."""
    return "23"


def prompt_of(scripted: Scripted, messages: Any = QUESTION, **options: Any) -> str:
    scripted.follow()
    [output] = scripted.llm.chat(messages, SamplingParams(max_tokens=1, temperature=0.0), **options)
    assert output.prompt is not None
    return output.prompt


def ask(scripted: Scripted, written: str, params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    """Chat with a model that writes, and reads, this after the prompt."""
    scripted.follow(prompt_of(scripted, **options) + written)
    [output] = scripted.llm.chat(QUESTION, params, **options)
    return output


def only(output: RequestOutput) -> CompletionOutput:
    [completion] = output.outputs
    return completion


def test_every_turn_has_its_reasoning_beside_its_content(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3)
    written = f"<think>\nI might {CALL} it.\n</think>\n\nWell.\n{CALL}{READ}<think>\nSo 23.\n</think>\n\n23 it is.{END}"
    completion = only(ask(scripted, written, tools=[price]))
    called, _, answer = completion.messages
    assert (called["reasoning_content"], called["content"]) == (f"I might {CALL} it.", "Well.")
    assert answer == {"role": "assistant", "content": "23 it is.", "reasoning_content": "So 23."}
    assert len(called["tool_calls"]) == len(completion.interceptions) == 1
    assert scripted.tokenizer.decode(completion.token_ids, skip_special_tokens=False) == written


def test_a_prompt_may_open_the_reasoning_of_every_turn(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3_OPENED)
    written = f"I might {CALL} it.\n</think>\n\n{CALL}{READ}<think>\nSo 23.\n</think>\n\n23 it is.{END}"
    called, _, answer = only(ask(scripted, written, tools=[price])).messages
    assert called["reasoning_content"] == f"I might {CALL} it."
    assert answer == {"role": "assistant", "content": "23 it is.", "reasoning_content": "So 23."}


def test_where_thinking_is_off_marks_are_text_but_for_a_closing_one_at_the_beginning(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3)
    completion = only(ask(scripted, f"</think>23.</think>{END}", chat_template_kwargs={"enable_thinking": False}))
    assert completion.messages == ({"role": "assistant", "content": "23.</think>"},)


def test_what_was_thought_renders_to_the_very_tokens_that_were_computed_until_the_next_question(
    make_scripted: Make,
) -> None:
    scripted = make_scripted(QWEN3)
    written = f"<think>\nA lamp.\n</think>\n\nWell.\n{CALL}{READ}<think>\nSo 23.\n</think>\n\n23 it is.{END}"
    output = ask(scripted, written, tools=[price])
    messages = [*QUESTION, *only(output).messages]
    assert output.prompt is not None
    assert prompt_of(scripted, messages, tools=[price]).startswith(output.prompt + written)
    later = prompt_of(scripted, [*messages, {"role": "user", "content": "And two?"}], tools=[price])
    assert "<think>" not in later
    assert "23 it is." in later


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "23.", "reasoning_content": "Hm."},
        {"content": "23.", "reasoning": "Hm."},
        {"content": "<think>\nHm.\n</think>\n\n23."},
    ],
)
def test_a_client_may_give_reasoning_back_as_it_likes(make_scripted: Make, turn: dict[str, str]) -> None:
    messages = [*QUESTION, {"role": "assistant"} | turn]
    prompt = prompt_of(make_scripted(QWEN3), messages, add_generation_prompt=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\nHm.\n</think>\n\n23.<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (QWEN3, '<think>\nA {lamp}?\n</think>{"price": 23}'),
        (QWEN3, '{"price": 23}'),
        (QWEN3_OPENED, 'A {lamp}?</think>{"price": 23}'),
    ],
)
def test_structured_outputs_begin_behind_the_reasoning(make_scripted: Make, template: str, written: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=JSON)
    completion = only(ask(make_scripted(template), written + END, params))
    assert completion.text == written
    assert completion.finish_reason == "stop"
    assert completion.messages[-1]["content"] == '{"price": 23}'
    assert completion.messages[-1].get("reasoning_content") == ("A {lamp}?" if "lamp" in written else None)


def test_what_was_asked_for_comes_though_the_model_would_end_within_its_reasoning(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3_OPENED)
    params = SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=JSON)
    completion = only(ask(scripted, f"Hm.{END}", params))
    assert completion.finish_reason == "length"
    assert completion.messages[-1]["content"] == ""


def test_every_turn_of_calls_has_reasoning_and_what_was_asked_for(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN3)
    call = r'"<tool_call>\n{\"name\": \"price\", \"arguments\": {\"item\": \"" /[a-z]+/ "\"}}\n</tool_call>"'
    constraint = StructuredOutputsParams(grammar=f'start: call | "It is " /[0-9]+/ "."\ncall: {call}')
    written = f"<think>\nA lamp.\n</think>{CALL}{READ}<think>\nSo 23.\n</think>It is 23.{END}"
    for n, temperature in ((1, 0.0), (2, 1.0)):
        params = SamplingParams(temperature=temperature, max_tokens=400, structured_outputs=constraint, n=n, seed=1)
        for completion in ask(scripted, written, params, tools=[price]).outputs:
            assert scripted.tokenizer.decode(completion.token_ids, skip_special_tokens=False) == written
            assert [message.get("reasoning_content") for message in completion.messages] == ["A lamp.", None, "So 23."]
