"""Greedy tokens of the embedded model are those of Hugging Face transformers, also when contexts are lost all the time."""

import json
from pathlib import Path
from typing import Any

import pytest

from jinfercept.calls import Call, Tool
from jinfercept.intercept.detector import ScriptedDetector
from jinfercept.llm import LLM
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from tests.support.tiny_model import TIE

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_greedy.json").read_text())


def prompts(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": run["prompt_ids"]} for run in runs]


def check(outputs: list[RequestOutput], runs: list[dict[str, Any]]) -> None:
    """Equal tokens, but for what follows a step where the reference's two best are tied."""
    for output, run in zip(outputs, runs, strict=True):
        ours, theirs = output.outputs[0].token_ids, run["tokens"][: output.outputs[0].num_generated]
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        assert first is None or run["margins"][first] < TIE, f"{output.request_id} differs at token {first}"


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_prompts_of_sixty_four_tokens_equal_transformers(smollm2: LLM, count: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=GOLDEN["new_tokens"], ignore_eos=True)
    outputs = smollm2.generate(prompts(GOLDEN["runs"][:count]), params)
    assert len(outputs) == count
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)
    check(outputs, GOLDEN["runs"][:count])


@pytest.mark.parametrize(
    "policy",
    ["copy_ahead", *(pytest.param(name, marks=pytest.mark.slow) for name in ("discard", "swap", "min_waste"))],
)
def test_interruptions_that_return_nothing_leave_the_tokens_of_transformers(smollm2: LLM, policy: str) -> None:
    smollm2.restart(policy=policy)
    runs = GOLDEN["runs"][:6]
    detector = ScriptedDetector({n: [Call("nothing", "")] for n in (3, 9, 17)})
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = smollm2.generate(prompts(runs), params, tools=[Tool(no_tokens, name="nothing")], detector=detector)
    assert all(len(output.outputs[0].interceptions) == 3 for output in outputs)
    check(outputs, runs)


def no_tokens(argument: str) -> list[int]:
    return []
