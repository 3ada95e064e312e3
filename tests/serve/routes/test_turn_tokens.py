"""A follow-up continues from the tokens that the model wrote, where its template would write the turn in another way."""

from typing import Any, NamedTuple

import pytest

from jinfercept.chat.messages import checked_message
from jinfercept.chat.template import ChatTemplate
from tests.support import responses as of_responses
from tests.support.anthropic_client import PRICE as MESSAGES_PRICE
from tests.support.anthropic_client import create
from tests.support.chat_templates import QWEN, QWEN3
from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED as QUESTION
from tests.support.responses import CALL
from tests.support.responses import CHAT_PRICE as PRICE
from tests.support.scripted_model import Make, Scripted
from tests.support.tool_server import ask, cached

LOOSE = '<tool_call>{"arguments":{"item":"lamp"},  "name":"price"}</tool_call>'
RESULT = "<|im_start|>user\n<tool_response>\n23\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
ANSWER = "It costs 23."
STRIPS = QWEN.replace("{{- message.content }}", "{{- message.content | trim }}")


class Shape(NamedTuple):
    """A template and a turn that it writes in another way than the model."""

    template: str
    written: str


SHAPES = {
    "drops reasoning": Shape(QWEN3, f"<think>\nA lamp.\n</think>\n\n{CALL}"),
    "writes arguments anew": Shape(QWEN, LOOSE),
    "strips content": Shape(STRIPS, f" \n Let me see. \n\n\n{CALL}"),
}


class Turn(NamedTuple):
    """What a client has read: tokens of the prompt, those of them that were not computed, tokens of the answer."""

    prompt: int
    cached: int
    written: int
    text: str
    message: Any


def chat(served: Running, messages: Any, **fields: Any) -> Turn:
    """A chat completion; its message comes without reasoning, as most clients send it back."""
    body: Any = {"model": MODEL, "temperature": 0, "max_tokens": 150, "tools": [PRICE]}
    done = served.client.chat.completions.create(messages=messages, **(body | fields))
    message = done.choices[0].message.model_dump(exclude_none=True)
    for name in ("reasoning", "reasoning_content"):
        message.pop(name, None)
    usage: Any = done.usage
    details = usage.prompt_tokens_details
    return Turn(
        usage.prompt_tokens, details.cached_tokens, usage.completion_tokens, message.get("content", ""), message
    )


def result(message: Any) -> Any:
    [call] = message["tool_calls"]
    return {"role": "tool", "tool_call_id": call["id"], "content": "23"}


def made_anew(scripted: Scripted, messages: Any, tools: Any = (PRICE,)) -> str:
    """What the template writes."""
    return ChatTemplate(scripted.tokenizer, [*tools], None, {}, ()).render([*map(checked_message, messages)])


def scripts_round(scripted: Scripted, written: str) -> None:
    """Has the model call, read the result behind what it wrote, and answer; whatever else it reads, it writes no answer."""
    scripted.follow(prompt_of(scripted, QUESTION, [PRICE]) + written + END + "\n" + RESULT + ANSWER + END, end_every=50)


def continues(first: Turn, then: Turn) -> bool:
    """Whether a turn has computed nothing that stands before it, but for the token that ends the last turn."""
    return then.cached >= first.prompt + first.written - 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_round_of_a_tool_goes_on_from_what_the_model_wrote(
    served: Running, make_scripted: Make, shape: Shape
) -> None:
    scripted = make_scripted(shape.template)
    scripts_round(scripted, shape.written)
    first = chat(served, QUESTION)
    messages = [*QUESTION, first.message, result(first.message)]
    then = chat(served, messages)
    assert then.text == ANSWER
    assert continues(first, then)
    assert then.prompt != len(scripted.tokenizer.encode(made_anew(scripted, messages)))


@pytest.mark.parametrize(
    ("kept", "shape"),
    [
        *(("previous_response_id", name) for name in SHAPES),
        ("conversation", "drops reasoning"),
        ("by the client", "drops reasoning"),
    ],
)
def test_a_response_goes_on_from_what_the_model_wrote(
    served: Running, make_scripted: Make, kept: str, shape: str
) -> None:
    scripts_round(make_scripted(SHAPES[shape].template), SHAPES[shape].written)
    conversation = {"conversation": served.client.conversations.create().id} if kept == "conversation" else {}
    first = of_responses.answer(served, tools=[of_responses.PRICE], **conversation)
    call = first.output[-1]
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": "23"}]
    before = {"previous_response_id": first.id} if kept == "previous_response_id" else conversation
    if kept == "by the client":
        given = [*QUESTION, *(item.model_dump() for item in first.output if item.type != "reasoning"), *given]
    then = of_responses.answer(served, given, tools=[of_responses.PRICE], **before)
    assert then.output_text == ANSWER
    assert then.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


@pytest.mark.parametrize("shape", ["drops reasoning", "strips content"])
def test_a_message_goes_on_from_what_the_model_wrote(served: Running, make_scripted: Make, shape: str) -> None:
    scripts_round(make_scripted(SHAPES[shape].template), SHAPES[shape].written)
    first = create(served, QUESTION, tools=[MESSAGES_PRICE])
    blocks = [block for block in first.to_param()["content"] if block.type != "thinking"]
    back = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "23"}
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [back]}]
    then = create(served, [*QUESTION, *turns], tools=[MESSAGES_PRICE])
    assert then.content[-1].text == ANSWER
    read = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
    assert then.usage.cache_read_input_tokens >= read - 1


def test_a_question_behind_rounds_that_the_client_does_not_see_goes_on_from_them(
    server: Running, scripted: Scripted
) -> None:
    tools = [server.service.tools.tools[name] for name in ("price", "hang")]
    whole = prompt_of(scripted, QUESTION, tools) + LOOSE + END + "\n" + RESULT + ANSWER + END
    scripted.follow(whole + "\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\nBye." + END, end_every=50)
    first = ask(server, QUESTION).choices[0].message
    assert (first.content, first.tool_calls) == (ANSWER, None)
    done = ask(server, [*QUESTION, first.model_dump(exclude_none=True), {"role": "user", "content": "Thanks"}])
    assert done.choices[0].message.content == "Bye."
    assert cached(done) >= len(scripted.tokenizer.encode(whole)) - 1


def test_a_turn_that_was_cut_off_or_cut_short_is_not_continued(served: Running, make_scripted: Make) -> None:
    scripted = make_scripted(STRIPS)
    behind = {"role": "user", "content": "And two?"}
    for fields in ({"max_tokens": 8}, {"stop": "costs"}, {"extra_body": {"jinfercept": {"release": True}}}):
        scripted.follow(prompt_of(scripted, QUESTION, [PRICE]) + "  " + ANSWER + END, end_every=50)
        first = chat(served, QUESTION, **fields)
        anew = made_anew(scripted, messages := [*QUESTION, first.message, behind])
        scripted.follow(anew + "46." + END, end_every=50)
        assert chat(served, messages).text == "46."
