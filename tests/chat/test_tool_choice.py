"""Chats whose model has to call, may not, or may call once: with a model that says nothing of itself but what a script has."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS, Beginning
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.turn_grammars import PerTurnGrammar, tool_choice
from jinfercept.errors import RequestError
from jinfercept.events import CallStarted, Content
from jinfercept.hooks import Constraint
from jinfercept.outputs import CompletionOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.chat_templates import LLAMA, MISTRAL, MISTRAL_SMALL, PLAIN, QWEN, QWEN3, QWEN3_CODER
from tests.support.engine_state import engine_state
from tests.support.sample_tokenizers import MERGES, VOCAB
from tests.support.scripted_model import Make, Scripted

QUESTION = [{"role": "user", "content": "How much is a lamp?"}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp", "number": 1}}\n</tool_call>'
END = "<|im_end|>"
RANDOM = SamplingParams(temperature=1.0, seed=3, max_tokens=300)
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
DECLARED = {"name": "buy", "parameters": {"properties": {"item": {"enum": ["lamp", "pen"]}}, "required": ["item"]}}
WRITTEN = pytest.mark.parametrize(
    ("template", "options"),
    [
        (QWEN, {}),
        (QWEN3_CODER, {}),
        (LLAMA, {}),
        (MISTRAL, {}),
        (MISTRAL_SMALL, {}),
        (PLAIN, {"tool_call_parser": "pythonic"}),
    ],
    ids=[
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "mistral-new",
        "pythonic",
    ],
)


def price(item: Literal["lamp", "pen"], number: Literal[1, 2], exact: bool = False) -> str:
    """The price of some of an item."""
    assert type(number) is int
    return f"{item} {number}"


def now() -> str:
    """What time it is."""
    return "noon"


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def make(request: pytest.FixtureRequest, make_scripted: Make) -> Iterator[Make]:
    """At both depths."""
    llm = make_scripted(None).llm
    llm.restart(pipeline_depth=request.param)
    yield make_scripted
    llm.restart(pipeline_depth=1)


def answers(scripted: Scripted, params: SamplingParams, *, written: str = "", **options: Any) -> list[CompletionOutput]:
    """The outputs of a model that likes to write this behind the prompt, and exclamation marks wherever nothing is said."""
    options = {"tools": [price, now], "reasoning_parser": None, **options}
    scripted.follow()
    free = {key: value for key, value in options.items() if key not in ("tool_choice", "parallel_tool_calls")}
    [output] = scripted.llm.chat(QUESTION, SamplingParams(max_tokens=1, temperature=0.0), **free)
    assert output.prompt is not None
    scripted.follow(output.prompt + written)
    [output] = scripted.llm.chat(QUESTION, params, **options)
    return output.outputs


def called(completion: CompletionOutput) -> list[str]:
    """What was called and run in the first turn, every call with a result."""
    [pause, *_] = completion.interceptions
    assert [result.status for result in pause.results] == ["ok"] * len(pause.calls)
    assert len(completion.messages[0]["tool_calls"]) == len(pause.calls)
    assert completion.messages[0]["content"] == ""
    return [call.name for call in pause.calls]


@WRITTEN
def test_the_first_turn_calls_and_what_comes_of_it_is_answered_freely(
    make_scripted: Make, template: str, options: dict[str, Any]
) -> None:
    [completion] = answers(make_scripted(template), RANDOM, tool_choice="required", **options)
    assert called(completion)
    assert len(completion.interceptions) == 1
    assert set(completion.messages[-1]["content"].strip()) == {"!"}
    assert completion.finish_reason == "length"


@WRITTEN
def test_one_call_of_the_named_tool(make_scripted: Make, template: str, options: dict[str, Any]) -> None:
    options |= {"tool_choice": {"type": "function", "function": {"name": "buy"}}, "parallel_tool_calls": False}
    for seed in range(2):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=400)
        [completion] = answers(make_scripted(template), params, tools=[price, DECLARED], **options)
        assert completion.finish_reason == "tool_calls"
        assert [call["function"]["name"] for call in completion.messages[-1]["tool_calls"]] == ["buy"]


def test_every_fork_has_to_call(make: Make) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=250, n=3)
    for completion in answers(make(QWEN), params, tool_choice="required"):
        assert called(completion)


def test_what_has_to_be_called_is_called_behind_the_reasoning(make: Make) -> None:
    written = "<think>\nNot yet.\n</think>\n\n"
    options: dict[str, Any] = {"tool_choice": "required", "reasoning_parser": "auto", "tools": [DECLARED]}
    for seed in range(2):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=300)
        [completion] = answers(make(QWEN3), params, written=written, **options)
        [message] = completion.messages
        assert {call["function"]["name"] for call in message["tool_calls"]} == {"buy"}
        assert (message["content"], message["reasoning_content"]) == ("", "Not yet.")


def test_the_form_of_the_answer_is_asked_of_later_turns(make: Make) -> None:
    constraint = StructuredOutputsParams(choice=["23", "46"])
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=300, structured_outputs=constraint)
    [completion] = answers(make(QWEN), params, tool_choice="required")
    assert called(completion)
    assert completion.messages[-1]["content"] in ("23", "46")
    assert completion.finish_reason == "stop"


def test_without_parallel_calls_the_first_of_a_turn_is_taken(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    both = f"{CALL}\n{CALL.replace('lamp', 'pen')}{END}"
    [completion] = answers(scripted, GREEDY, written=both, parallel_tool_calls=False)
    assert [call.arguments for call in completion.interceptions[0].calls] == ['{"item": "lamp", "number": 1}']
    assert len(completion.messages[0]["tool_calls"]) == 1
    assert [message["content"] for message in completion.messages if message["role"] == "tool"] == ["lamp 1"]
    events = list(scripted.llm.stream(QUESTION, GREEDY, tools=[price, now], parallel_tool_calls=False))
    assert len([event for event in events if isinstance(event, CallStarted)]) == 1
    shown = [event.text for event in events if isinstance(event, Content)]
    assert "tool_call" not in "".join(shown)


@WRITTEN
def test_stop_strings_cut_no_call_that_has_to_be_made(
    make_scripted: Make, template: str, options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=300, stop=["\n", "item", '"', "{", "[", "!"])
    options = {**options, "tool_choice": "required", "parallel_tool_calls": False}
    [completion] = answers(make_scripted(template), params, **options)
    assert called(completion)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "!")


def test_stop_strings_cut_what_is_shown_and_no_call(make_scripted: Make) -> None:
    scripted, tools = make_scripted(QWEN3), {"tools": [DECLARED], "reasoning_parser": "auto"}
    answers(scripted, GREEDY, written=f"<think>Hm{{m}}.</think>Let me see.\n{CALL}\n{CALL}{END}", **tools)

    def stopped(*stop: str) -> CompletionOutput:
        params = SamplingParams(temperature=0.0, max_tokens=300, stop=stop)
        [output] = scripted.llm.chat(QUESTION, params, **tools)
        return output.outputs[0]

    for stop in ("ee.\n", "{m", "\n"):
        completion = stopped(stop)
        assert completion.stop_reason == stop
        assert completion.text.endswith({"ee.\n": "Let me s", "{m": "Hm", "\n": "see."}[stop])
        assert "tool_calls" not in completion.messages[0]
    completion = stopped("}\n", ">\n{", "lamp", '{"name', "call>\n<")
    assert [call["function"]["name"] for call in completion.messages[0]["tool_calls"]] == ["price"] * 2
    assert (completion.messages[0]["content"], completion.finish_reason) == ("Let me see.", "tool_calls")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "always"}, "tool_choice has an unknown value"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice has an unknown value"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice has an unknown value"),
        ({"tool_choice": {"type": "function", "function": {"name": "buy"}}}, "does not declare"),
        ({"tool_choice": "required", "tools": []}, "does not declare"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
        ({"tool_choice": "required", "tool_call_parser": "pythonic", "tools": [{"name": "a<b"}]}, "name of this tool"),
        (
            {"tool_choice": "required", "tools": [{"name": "f", "parameters": {"type": "array"}}]},
            "no object",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(make_scripted: Make, options: dict[str, Any], message: str) -> None:
    scripted = make_scripted(QWEN)
    chat: Any = scripted.llm.chat
    with pytest.raises(RequestError, match=message):
        chat(QUESTION, GREEDY, **{"tools": [price], **options})
    ignoring = SamplingParams(ignore_eos=True, max_tokens=9)
    with pytest.raises(RequestError, match="ignore_eos"):
        chat(QUESTION, ignoring, tools=[price], tool_choice="required")
    assert not engine_state(scripted.llm).has_work


def test_what_no_grammar_holds_is_checked_when_the_call_is_run(
    make_scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jinfercept.chat.turn_grammars")
    scripted = make_scripted(QWEN)
    text = {"type": "string", "format": "regex", "description": "x"}
    listed = {"type": "array", "items": text, "uniqueItems": True, "minItems": 1}
    number = {"type": "int", "minimum": -(10**30)}
    schema = {"properties": {"a": listed, "b": number}, "required": ["a", "b"], "propertyNames": {"type": "string"}}
    tools: list[Any] = [{"name": f"unlike{index}", "parameters": schema} for index in range(4)]
    for _ in range(2):
        written = CALL.replace("price", "unlike3").replace(
            '{"item": "lamp", "number": 1}', '{"a": ["x", "x"], "b": -7}'
        )
        [completion] = answers(
            scripted, GREEDY, written=written + END, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        [call] = completion.messages[0]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": ["x", "x"], "b": -7}
    [record] = [record for record in caplog.records if "'unlike3'" in record.message]
    assert record.message.endswith("#/properties/a/items/format, #/properties/a/uniqueItems'")
    many = [{"name": f"t{index}", "parameters": schema | {"description": "x" * 6_000}} for index in range(30)]
    scripted.llm.make_chats([QUESTION], None, many, {"tool_choice": "required"})
    refused = {"name": "f", "parameters": {"properties": {"a": {"not": {"type": "string"}}}}}
    with pytest.raises(RequestError, match=r"a call of tool 'f'; got .*#/properties/a/not"):
        scripted.llm.make_chats([QUESTION], None, [refused], {"tool_choice": "required"})


def test_a_schema_puts_no_line_of_its_own_into_the_log(make_scripted: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jinfercept.chat.turn_grammars")
    schema = {"properties": {"a\n12:00 INFO": {"type": "array", "uniqueItems": True}}}
    make_scripted(QWEN).llm.make_chats(
        [QUESTION], None, [{"name": "f", "parameters": schema}], {"tool_choice": "required"}
    )
    [record] = caplog.records
    assert "\n" not in record.message
    assert "a\\n12:00" in record.message


def test_a_choice_says_who_may_be_called() -> None:
    tools = chat_tools([price, now, DECLARED])
    assert tool_choice("required", True, tools).must_call == {"price", "now", "buy"}
    assert tool_choice(None, True, tools) == tool_choice("auto", True, tools)
    assert not tool_choice("none", True, tools).reads
    assert not tool_choice("auto", True, []).reads


BEGINNINGS = {"a", "b", "c", "ab", "abc"}
MARKS = ["<think>", "</think>", "</think>\n", "</think>ab"]


def tokenizer_of(marks: list[str]) -> Tokenizer:
    """Single bytes, a few longer tokens, and these marks as tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_tokens(marks)
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=frozenset(backend.encode("<end>").ids))


def constraint(tokenizer: Tokenizer, *beginnings: Beginning, turns: int = 1, regex: str = "[a-c]{3}") -> Constraint:
    """Of one turn, the last of so many."""
    first, later = (*beginnings, *beginnings)[:2]
    grammar = Grammars(tokenizer, VOCAB).compile(StructuredOutputsParams(regex=regex))
    each = PerTurnGrammar((grammar, grammar), (first, later), REASONING_FORMATS["qwen3"], tokenizer)
    last = [each.constrain(tokenizer.eos_token_ids) for _ in range(turns)][-1]
    assert last is not None
    return last


def may_come(constraint: Constraint, tokenizer: Tokenizer) -> set[str]:
    words = constraint.allowed()
    return {
        tokenizer.token_text(token) for token in range(tokenizer.vocab_size) if words[token // 32] >> token % 32 & 1
    }


def take(constraint: Constraint, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text):
        assert constraint.allowed()[token // 32] >> token % 32 & 1, tokenizer.token_text(token)
        constraint.accept(token)


@pytest.mark.parametrize("marks", [[], MARKS[:2]])
@pytest.mark.parametrize("regex", ["<tag>|[a-c]{3}", "[a-c]{3}"])
def test_a_turn_that_may_begin_with_either_goes_on_as_it_began(marks: list[str], regex: str) -> None:
    tokenizer = tokenizer_of(marks)
    for text in ("abc", "<think>ab</think>abc", *(("<tag>", "<think></think><tag>") if "<" in regex else ())):
        matcher = constraint(tokenizer, "undecided", regex=regex)
        take(matcher, tokenizer, text)
        assert matcher.ended
    begun = constraint(tokenizer, "undecided", regex=regex)
    assert may_come(begun, tokenizer) >= {*BEGINNINGS, "<think>" if marks else "<"}
    with pytest.raises(RequestError, match="does not allow"):
        begun.accept(tokenizer.encode("x")[0])


def test_text_in_the_token_that_closes_the_reasoning_is_the_answers() -> None:
    tokenizer = tokenizer_of(MARKS)
    for text, follows in (("</think>\n", BEGINNINGS), ("</think>ab", {"a", "b", "c"})):
        matcher = constraint(tokenizer, "thinking")
        [token] = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == text]
        matcher.accept(token)
        assert may_come(matcher, tokenizer) == follows
