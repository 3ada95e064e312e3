"""Chats through templates with the traits of published ones: calls in their formats, their ids, what goes back."""

from typing import Any

import pytest

from jinfercept.outputs import CompletionOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.chat_templates import PLAIN, QWEN
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
