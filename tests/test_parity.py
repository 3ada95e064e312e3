"""Tokens are those of transformers, of the embedded model and of every family, also when contexts are lost all the time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.llm import LLM
from jinfercept.models.load import load
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from tests.models.test_variants import VARIANTS, write
from tests.support.dense_model import logits
from tests.support.tiny_model import TIE, Workload, count_ties, tiny_llm

SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *(
            "mistral",
            "mistral_windowed",
            "ministral3",
            "qwen2",
            "mixtral",
            "qwen3_moe",
            "qwen3_moe_mixed",
            "glm4_moe",
            "olmo2",
            "olmo3",
            "phi3",
            "granite",
        ),
        *(
            "smollm3",
            "gemma",
            "gemma2",
            "gemma3",
            "gemma4",
            "gemma4_moe",
            "gemma4_e4b",
            "gpt_oss",
            "gpt_oss_mxfp4",
            "gptj_published",
            "qwen3_5",
            "qwen3_5_moe",
            "nemotron_h",
            "nemotron_h_latent",
        ),
    )
]


@pytest.mark.parametrize("name", ["qwen3", *SLOW])
def test_tokens_of_a_family_do_not_depend_on_pages_and_calls(name: str) -> None:
    with tiny_llm(name, policy="discard", max_num_batched_tokens=8, max_num_seqs=4, kv_tokens=256) as llm:
        outputs = Workload(6, seed=1).run(llm)
    assert sum(count_ties(name, output) for output in outputs) <= 1


def test_an_engine_serves_sequences_beyond_a_longropes_original_length_by_its_long_factors(tmp_path: Path) -> None:
    variant = VARIANTS["longrope of phi3 beyond the original length"]
    directory = write(variant["base"], tmp_path / "model", variant["changes"], variant["added"])
    prompt, greedy = list(range(20)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with tiny_llm(str(directory), max_model_len=24, max_num_seqs=1, max_num_batched_tokens=8, kv_tokens=64) as llm:
        tokens = llm.generate({"prompt_token_ids": prompt}, greedy)[0].outputs[0].token_ids
    loaded = load(directory, dtype="float32").for_length(24)
    ours = np.asarray(logits(loaded.model, loaded.params, np.array(prompt + tokens)))
    assert tokens == ours[len(prompt) - 1 : -1].argmax(axis=1).tolist()


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
