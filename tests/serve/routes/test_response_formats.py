"""Schemas of an answer are enforced wherever a client puts them, or refused; none is ignored."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.support.live_server import END, MODEL, Running, prompt_of
from tests.support.responses import ASKED, CALL
from tests.support.scripted_model import Scripted


class Price(BaseModel):
    """What something costs."""

    item: str
    dollars: int
    kind: Literal["new", "used"]


PRICED = '{"item": "lamp", "dollars": 23, "kind": "new"}'


def test_openai_parses_a_chat_into_a_class(served: Running, scripted: Scripted) -> None:
    scripted.follow(prompt_of(scripted, ASKED) + PRICED + END)
    chat: Any = {"model": MODEL, "messages": ASKED, "temperature": 0, "response_format": Price}
    message = served.client.chat.completions.parse(**chat).choices[0].message
    assert message.parsed == Price(item="lamp", dollars=23, kind="new")
    with served.client.chat.completions.stream(**chat) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == message.parsed
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_openai_parses_the_arguments_of_a_streamed_call(served: Running, scripted: Scripted) -> None:
    import openai

    class price(BaseModel):
        """The price of an item."""

        item: str

    tool = openai.pydantic_function_tool(price)
    scripted.follow(prompt_of(scripted, ASKED, [tool]) + CALL + END)
    messages: Any = ASKED
    with served.client.chat.completions.stream(model=MODEL, messages=messages, temperature=0, tools=[tool]) as stream:
        events = list(stream)
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done.parsed_arguments == price(item="lamp")


SCHEMA: Any = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
BARE: Any = {name: value for name, value in SCHEMA.items() if name != "type"}
CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
INPUT: Any = {PATHS[0]: CHAT, PATHS[1]: {"prompt": "Hi"}, PATHS[2]: {"input": "Hi"}, PATHS[3]: CHAT}


def text_of(answer: Any) -> str:
    """The text of a whole answer of any dialect."""
    if "choices" in answer:
        return answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
    content = answer["content"] if "content" in answer else answer["output"][-1]["content"]
    return content[-1]["text"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS[0], {"response_format": {"type": "json_object", "schema": BARE}}),
        (PATHS[0], {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}),
        (PATHS[0], {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
        (PATHS[0], {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
        (PATHS[0], {"structured_outputs": {"json": SCHEMA}}),
        (PATHS[0], {"structured_outputs": {"choice": ['{"n": 7}']}}),
        (PATHS[1], {"response_format": {"type": "json_object", "schema": SCHEMA}, "max_tokens": 40}),
        (PATHS[2], {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}),
        (PATHS[3], {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (PATHS[3], {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"}}),
        (PATHS[3], {"output_format": {"type": "json_schema", "schema": SCHEMA}, "output_config": {"effort": "low"}}),
    ],
)
def test_a_schema_is_enforced_wherever_it_stands(
    served: Running, scripted: Scripted, path: str, fields: dict[str, Any]
) -> None:
    scripted.follow()
    limit = {"max_output_tokens": 40, "reasoning": {"effort": "none"}} if path == PATHS[2] else {}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}} if path != PATHS[1] else {}
    answer = served.http.post(path, json=INPUT[path] | {"temperature": 0} | fields | limit | kwargs)
    assert answer.status_code == 200, answer.text
    assert json.loads(text_of(answer.json())) == {"n": 7}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATHS[0], {"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        (
            PATHS[0],
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {}}},
            "response_format.schema",
        ),
        (PATHS[0], {"response_format": {"type": "json_object", "schema": {"type": "odd"}}}, "response_format"),
        (PATHS[1], {"regex": "a+"}, "regex"),
        (PATHS[2], {"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text.format"),
        (PATHS[2], {"response_format": {"type": "json_object"}}, "response_format"),
        (PATHS[3], {"output_format": {"type": "json_schema", "schema": {"type": "odd"}}}, "output_format"),
        (
            PATHS[3],
            {
                "output_format": {"type": "json_schema", "schema": SCHEMA},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format",
        ),
        (PATHS[3], {"response_format": {"type": "json_object"}}, "response_format"),
        (PATHS[3], {"guided_json": SCHEMA}, "guided_json"),
    ],
)
def test_a_format_that_is_not_enforced_is_refused_by_name(
    served: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = served.http.post(path, json=INPUT[path] | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    first = error["message"].replace(":", " ").split()[0]  # errors of Anthropic's protocol have no field for it
    assert error.get("param", first) == param, error
