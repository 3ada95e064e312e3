"""Drafts on a real model: the same tokens, the same distribution, and nothing compiles for them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from jinfercept.llm import LLM
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.tiny_model import Workload, count_ties, reference_logits, streams, tiny_llm

pytestmark = pytest.mark.usefixtures("every_step_takes_a_second")

NAME = "llama_gqa"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MACHINE = "roofline-llama-13b-a100"
"""The costs of a machine on which a step with a few more tokens takes hardly longer."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A pool that holds little more than the longest sequence."""
    pool = {"kv_tokens": 160, "max_model_len": 120, "swap_space": 0.001, "profile": MACHINE}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    with tiny_llm(NAME, speculative_config=DRAFTS, lazy=False, **pool, **sizes) as llm:
        yield llm


def workload() -> Workload:
    """Greedy requests, and sampled ones with a seed; with calls, and a few with log probabilities."""
    work = Workload(number=16, seed=3)
    for number, params in enumerate(work.params):
        changes = {"max_tokens": 12 + 2 * number}
        if number % 4 == 1:
            changes |= {"temperature": 0.3, "seed": number, "top_p": 0.8}
        elif number % 4 == 2:
            changes |= {"logprobs": 2}
        work.params[number] = replace(params, **changes)
    return work


def logprobs(output: RequestOutput) -> list[float]:
    """Of every generated token and of the likeliest ones in its place."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    return [entry.logprob for named in completion.logprobs if named is not None for entry in named.values()]


def test_every_policy_gives_the_tokens_of_a_run_without_drafts(llm: LLM) -> None:
    work = workload()
    llm.restart(policy="preserve", pipeline_depth=0, speculative_config=None)
    expected = work.run(llm)
    assert not llm.counters.drafted
    counter = CompileCounter()
    accepted = 0
    for number, policy in enumerate(("discard", "swap", "lru_host", "min_waste", "copy_ahead")):
        llm.restart(
            policy=policy,
            pipeline_depth=number % 2,
            max_chunk_tokens=(None, 7, 3)[number % 3],
            speculative_config=DRAFTS,
        )
        outputs = work.run(llm, delay_s=0.001)
        accepted += sum(llm.counters.accepted.values())
        for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
            assert streams([ours]) == streams([theirs]) or (index % 4 != 1 and count_ties(NAME, ours)), policy
            if work.params[index].logprobs is not None:
                assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)
    assert accepted > 50
    assert counter.count == 0
    counter.close()


PROMPT = [42, 45, 106, 104, 45, 7, 98, 38, 104, 7, 7, 11, 122, 105, 105, 105, 18, 16, 14, 23, 21, 92]
"""Has what the model is likely to write after it: one of five first drafts is accepted."""


def chances(tokens: tuple[int, ...], most: int) -> dict[int, float]:
    """The model's probabilities of its likeliest tokens after some tokens."""
    row = reference_logits(NAME, tokens)[-1]
    best = np.argsort(row)[-most:]
    weights = np.exp(row[best] - row.max())
    return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))


def test_drawn_tokens_have_the_distribution_of_the_model(llm: LLM) -> None:
    """Four tokens of requests without seeds: chi-square of what was drawn against the model's own probabilities."""
    llm.restart(policy="copy_ahead", pipeline_depth=0, speculative_config=DRAFTS, seed=5)
    check_distribution(llm, 400)


def check_distribution(llm: LLM, number: int) -> None:
    """Generate so many outputs with drafts, and compare how often each occurred with the model's own probabilities."""
    most = 3
    params = SamplingParams(temperature=1.0, top_k=most, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * number, params)
    assert llm.counters.accepted.total() > number / 8
    seen = Counter(tuple(stream) for stream in streams(outputs))
    expected: dict[tuple[int, ...], float] = {(): number}
    for _ in range(4):
        expected = {
            (*drawn, token): count * chance
            for drawn, count in expected.items()
            for token, chance in chances((*PROMPT, *drawn), most).items()
        }
    assert {*seen} <= {*expected}
    often = [drawn for drawn, count in expected.items() if count >= 5]
    pairs = [(seen[drawn], expected[drawn]) for drawn in often]
    pairs.append((number - sum(count for count, _ in pairs), number - sum(count for _, count in pairs)))
    chi_square = sum((count - mean) ** 2 / mean for count, mean in pairs)
    assert chi_square < len(often) + 4 * (2 * len(often)) ** 0.5, "more than four standard deviations above its mean"
