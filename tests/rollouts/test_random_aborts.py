"""Samples that are aborted at random moments and go on, under every policy, equal those that were never aborted."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfercept import LLM, Rollouts, SamplingParams, StructuredOutputsParams, Tool
from tests.rollouts.support import check_sample

CUTS: list[dict[str, Any]] = [{}, {"top_k": 8}, {"top_p": 0.8}, {"presence_penalty": 0.5, "repetition_penalty": 1.1}]
REGEX = StructuredOutputsParams(regex=r"[a-z ]{3,10}\([a-z]{1,8}\)[a-z ]{3,20}")


def count(text: str) -> str:
    time.sleep(len(text) % 7 * 0.02)  # calls last longer and shorter
    return f" [{len(text)}]"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    time.sleep(0.05)
    return a + b


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    with LLM("smollm2-135m", dtype="float32", kv_tokens=1024, max_model_len=512, page_size=16, max_num_seqs=6) as llm:
        yield llm


def drawn_case(llm: LLM, rng: random.Random) -> tuple[Any, SamplingParams, dict[str, Any]]:
    """Prompts, parameters and options."""
    kind = rng.choice(["text", "forced", "grammar", "chat"])
    tools: dict[str, Any] = {"tools": [Tool(count, start="(", stop=")")]}
    params = SamplingParams(
        temperature=rng.choice([0.8, 1.0]),
        seed=rng.randrange(1000),
        max_tokens=rng.choice([12, 40, 70]),
        ignore_eos=kind in ("text", "forced"),
        **rng.choice(CUTS),
    )
    if kind == "chat":
        questions = [f"What is {rng.randrange(9)}+{rng.randrange(9)}? Use add." for _ in range(2)]
        choice = rng.choice(["auto", "required"])
        return (
            [[{"role": "user", "content": text}] for text in questions],
            params,
            {"tools": [add], "tool_choice": choice},
        )
    if kind == "forced":
        calling = llm.get_tokenizer().encode(" go (abc) and (abcde)")[: params.max_tokens]
        params = replace(params, forced_output_ids=calling)
    if kind == "grammar":
        params, tools = replace(params, structured_outputs=REGEX), {}
    return ["Listen: (a) (bcd)", "Once upon a time there"], params, tools


def aborted(llm: LLM, rng: random.Random, prompts: Any, params: SamplingParams, options: dict[str, Any]) -> Rollouts:
    """Samples that were aborted up to three times."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        given = {} if isinstance(prompts, Rollouts) else {"params": params, **options}
        with llm.rollout_stream(prompts, **given) as stream:
            time.sleep(rng.random())
            if rng.random() < 0.6:
                stream.abort()
            else:
                stream.abort_group(0)
            prompts = stream.result()
    return prompts


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["copy_ahead", "discard", "min_waste", "preserve", "swap"])
def test_samples_that_go_on_equal_whole_ones(small: LLM, policy: str, seed: int) -> None:
    rng = random.Random(f"{policy} {seed}")
    small.restart(policy=policy)
    for _ in range(4):
        prompts, params, options = drawn_case(small, rng)
        options["n"] = rng.choice([1, 2, 3])
        whole = small.rollout(prompts, params, **options)
        resumed = small.rollout(aborted(small, rng, prompts, params, options))
        for sample, other in zip(resumed, whole, strict=True):
            assert sample.token_ids.tolist() == other.token_ids.tolist()
            assert sample.loss_mask.tolist() == other.loss_mask.tolist()
            assert np.allclose(sample.logprobs, other.logprobs, atol=1e-3)
            assert np.allclose(sample.processed_logprobs, other.processed_logprobs, atol=1e-3)
            assert [call[:4] for call in sample.calls] == [call[:4] for call in other.calls]
            assert (sample.finish_reason, sample.text) == (other.finish_reason, other.text)
            contents, others = ([message.get("content") for message in each.conversation] for each in (sample, other))
            assert contents == others
        check_sample(small, resumed[0])
