"""Structured outputs through the whole engine, on random weights: they parse, and nothing beside them changes them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import FormatDetector, ScriptedDetector
from jinfercept.chat.grammar.schemas import source_of
from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.errors import RequestError
from jinfercept.llm import LLM
from jinfercept.models.load import read_config
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.engine_state import engine_state
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import GOLDEN, TOOL, streams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["ab", "true", 7, None]},
        "sizes": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "sizes", "at"],
    "additionalProperties": False,
}
ASKED = (
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex=r"[abc]{3,9}(, [0-9]+)?"),
    StructuredOutputsParams(choice=["yes", "no", "no, never", "abc true"]),
    StructuredOutputsParams(grammar='start: "[" item ("," item)* "]"\nitem: %json {"type": "integer"} | "true"'),
    None,
)


def config_of_byte_level():
    return replace(read_config(GOLDEN / "llama_gqa"), vocab_size=VOCAB, eos_token_ids=(), max_position=256)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A pool that holds little more than the longest sequence."""
    flags: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "swap_space": 0.001}
    with LLM(
        config_of_byte_level(),
        load_format="dummy",
        tokenizer=byte_level(),
        dtype="float32",
        kv_tokens=240,
        max_model_len=200,
        check_pages=True,
        profile=MACHINE,
        lazy=False,
        speculative_config=DRAFTS,
        **flags,
    ) as llm:
        yield llm


def parses(constraint: StructuredOutputsParams, text: str) -> None:
    if constraint.json is not None:
        Draft202012Validator(PERSON).validate(json.loads(text))
    elif constraint.json_object:
        assert isinstance(json.loads(text), dict)
    elif constraint.grammar is not None:
        assert isinstance(json.loads(text), list)
    elif constraint.regex is not None:
        assert re.fullmatch(constraint.regex, text)
    else:
        assert text in (constraint.choice or ())


def generated(output: RequestOutput) -> str:
    """The text without what tools returned."""
    done = output.outputs[0]
    returned = {i for pause in done.interceptions for i in range(*pause.span)}
    return byte_level().decode(token for i, token in enumerate(done.token_ids) if i not in returned)


class Work:
    """Two requests of every kind, greedy and drawn, half of them with calls in the middle."""

    def __init__(self) -> None:
        self.prompts, self.params, self.detectors = [], [], []
        for number, constraint in enumerate(ASKED * 2):
            drawn = number >= len(ASKED)
            options: dict[str, Any] = {"temperature": float(drawn), "seed": 100 + number, "max_tokens": 120}
            self.params.append(SamplingParams(structured_outputs=constraint, **options))
            self.prompts.append("the same beginning, " + "ab" * number)
            calls = {at: [Call("scripted", "97 98 99")] for at in ((2, 3, 9) if number % 2 else ())}
            self.detectors.append(ScriptedDetector(calls))

    def run(self, llm: LLM, *rows: int, tools: tuple[Tool, ...] = (TOOL,)) -> list[RequestOutput]:
        rows = rows or tuple(range(len(self.prompts)))
        prompts, params = [self.prompts[row] for row in rows], [self.params[row] for row in rows]
        return llm.generate(prompts, params, tools=tools, detector=[self.detectors[row] for row in rows])


WORK = Work()
DRAFTS = '{"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
MACHINE = "roofline-llama-13b-a100"
"""The costs of a machine on which a step with a few more tokens takes hardly longer."""


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """Every request by itself."""
    llm.restart(policy="preserve", pipeline_depth=0, speculative_config=None)
    return [WORK.run(llm, row)[0] for row in range(len(WORK.prompts))]


def test_what_stops_parses_and_what_is_cut_says_so(alone: list[RequestOutput]) -> None:
    stopped = set()
    for output, params in zip(alone, WORK.params, strict=True):
        done = output.outputs[0]
        assert (done.finish_reason == "length") == (done.num_generated == 120)
        assert done.finish_reason in ("stop", "length")
        if done.finish_reason == "stop" and params.structured_outputs is not None:
            parses(params.structured_outputs, generated(output))
            stopped.add(source_of(params.structured_outputs))
    assert len(stopped) >= 4
    assert sum(len(output.interceptions) for output in alone) >= 10


@pytest.mark.parametrize(
    ("policy", "depth", "drafts"), [("min_waste", 1, None), ("discard", 0, DRAFTS), ("copy_ahead", 1, DRAFTS)]
)
def test_they_are_the_same_in_one_batch_under_every_policy(
    llm: LLM, alone: list[RequestOutput], policy: str, depth: int, drafts: str | None
) -> None:
    chunk = 5 if policy == "min_waste" else None
    llm.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=chunk, speculative_config=drafts)
    counter = CompileCounter()
    assert streams(WORK.run(llm)) == streams(alone)
    assert counter.count == 0
    counter.close()
    assert (llm.counters.accepted.total() > 40) == (drafts is not None)
    assert llm.counters.preemptions + llm.counters.recomputed + llm.counters.copied_in > 0, "the pool was never short"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_text_ends_at_any_end_token_or_without_one(llm: LLM, depth: int) -> None:
    llm.restart(policy="copy_ahead", pipeline_depth=depth)
    constraint, ends = StructuredOutputsParams(regex="[abc]{2,5}"), byte_level().eos_token_ids
    params = [
        SamplingParams(temperature=3.0, seed=seed, max_tokens=9, ignore_eos=ignore, structured_outputs=constraint)
        for ignore in (False, True)
        for seed in range(16)
    ]
    outputs = [output.outputs[0] for output in llm.generate(["go"] * 32, params)]
    assert all(re.fullmatch("[abc]{2,5}", output.text) and output.finish_reason == "stop" for output in outputs)
    assert {output.token_ids[-1] for output in outputs[:16]} >= ends
    assert not {token for output in outputs[16:] for token in output.token_ids} & ends


@pytest.mark.parametrize("depth", [0, 1])
def test_the_outputs_of_one_prompt_have_a_constraint_each(llm: LLM, depth: int) -> None:
    llm.restart(policy="copy_ahead", pipeline_depth=depth)
    constraints = ASKED[1], StructuredOutputsParams(regex="[abc]{1,6}|[0-9]{2}")
    params = [
        SamplingParams(temperature=1.0, max_tokens=100, n=12, seed=1, structured_outputs=constraint)
        for constraint in constraints
    ]
    objects, short = (
        {done.text for done in output.outputs if done.finish_reason == "stop"}
        for output in llm.generate(["go"] * 2, params)
    )
    assert all(isinstance(json.loads(text), dict) for text in objects)
    assert all(re.fullmatch("[abc]{1,6}|[0-9]{2}", text) for text in short)
    assert objects
    assert len(short) > 3


def test_a_tool_is_called_where_the_grammar_lets_the_model_call_it(llm: LLM) -> None:
    llm.restart(policy="copy_ahead", pipeline_depth=1, speculative_config=None)
    tool = Tool(lambda argument: f"it is {argument}", name="tell", start="<tell>", stop="</tell>", result=" ({}) ")
    constraint = StructuredOutputsParams(grammar='start: "<tell>" /[abc]{1,3}/ "</tell>" answer\nanswer: "yes" | "no"')
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs=constraint)
    (output,) = llm.generate("go", params, tools=[tool])
    argument = output.interceptions[0].calls[0].arguments
    assert re.fullmatch(rf"<tell>{argument}</tell> \(it is {argument}\) (yes|no)", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_a_grammar_of_a_turn_holds_for_every_turn_of_calls_in_the_models_own_format(
    llm: LLM, drafts: str | None
) -> None:
    llm.restart(policy="copy_ahead", pipeline_depth=1, speculative_config=drafts)
    call = r'"<tool_call>{\"name\": \"tell\", \"arguments\": {\"n\": " /[1-3]/ "}}</tool_call>"'
    constraint = StructuredOutputsParams(grammar=f'start: call | "done"\ncall: {call}')
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 300, "structured_outputs": constraint}
    tool = Tool(lambda arguments: f"got {json.loads(arguments)['n']}", name="tell")
    detector = FormatDetector(FORMATS["hermes"], byte_level().eos_token_ids)
    params = [SamplingParams(seed=seed, **options) for seed in range(8)]
    outputs = llm.generate(["go"] * 8, params, tools=[tool], detector=detector)
    for output in outputs:
        turn = r'<tool_call>{"name": "tell", "arguments": {"n": ([1-3])}}</tool_call>got \1'
        assert output.outputs[0].finish_reason == "length" or re.fullmatch(f"(?:{turn})*done", output.outputs[0].text)
    assert {output.outputs[0].finish_reason for output in outputs if len(output.interceptions) > 1} >= {"stop"}
    assert (llm.counters.accepted.total() > 100) == (drafts is not None)


def test_a_bad_constraint_is_refused_before_anything_starts(llm: LLM) -> None:
    good, bad = (SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)) for regex in ("a", "(("))
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate(["one", "two"], [good, bad])
    assert not engine_state(llm).has_work
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # pyright: ignore[reportArgumentType]


def test_a_grammar_holds_whatever_else_is_asked_for(llm: LLM) -> None:
    constraint, n = StructuredOutputsParams(choice=["yes"]), byte_level().encode("n")
    params = SamplingParams(structured_outputs=constraint, logit_bias={n[0]: 100}, bad_words=["y", "es"])
    (output,) = llm.generate("go", params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")


def test_allowed_tokens_and_a_grammar_are_not_combined(llm: LLM) -> None:
    constraint = StructuredOutputsParams(choice=["yes"])
    with pytest.raises(RequestError, match="allowed_token_ids cannot be combined with a grammar"):
        llm.generate("go", SamplingParams(structured_outputs=constraint, allowed_token_ids=[1]))


def test_min_tokens_does_not_break_a_grammar(llm: LLM) -> None:
    constraint = StructuredOutputsParams(choice=["a", "abc true"])
    params = SamplingParams(temperature=1.0, min_tokens=3, max_tokens=9, structured_outputs=constraint, n=4)
    (output,) = llm.generate("go", params, detector=ScriptedDetector({}))
    assert all(done.text in ("a", "abc true") and done.finish_reason == "stop" for done in output.outputs)
