"""Whatever is decided about contexts, the tokens are those of an uninterrupted run (DESIGN, what defines the product)."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.kv.page import Residency
from jinfercept.llm import LLM
from jinfercept.outputs import RequestOutput
from jinfercept.sched.sequence import Sequence
from tests.support.fake_engine import POLICIES
from tests.support.scheduler_bench import Scripted
from tests.support.tiny_model import Workload, count_ties, streams, tiny_llm

NAME = "llama_gqa"
WORKLOAD = Workload(number=12, seed=7)


class Shape(NamedTuple):
    """How an engine cuts its steps and its transfers."""

    layers_per_step: int
    staging_pages: int

    def __str__(self) -> str:
        return "{} layers, arrays of {}".format(*self)


SHAPES = (Shape(1, 1), Shape(2, 4), Shape(3, 16))


def matrix() -> Iterator[Any]:
    """Every shape under every policy and both depths; each policy runs by default in one shape with one depth."""
    for number, policy in enumerate(POLICIES):
        for place, shape in enumerate(SHAPES):
            for depth in (0, 1):
                marks = () if (place, depth) == (number % 3, number % 2) else pytest.mark.slow
                yield pytest.param(shape, policy, depth, marks=marks, id=f"{shape}, {policy}, {depth}")


@pytest.fixture(scope="module")
def reference() -> list[RequestOutput]:
    """The uninterrupted run: everything fits, nothing is ever lost."""
    with tiny_llm(kv_tokens=4096, max_num_seqs=16, policy="preserve", pipeline_depth=0) as llm:
        outputs = WORKLOAD.run(llm)
        assert llm.counters.recomputed <= llm.counters.interceptions  # an empty result computes one logit again
    return outputs


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def small(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A pool that holds little more than the longest sequence: eviction happens all the time."""
    with tiny_llm(kv_tokens=112, max_model_len=100, swap_space=0.001, **request.param._asdict()) as llm:
        yield llm


def check(outputs: list[RequestOutput], reference: list[RequestOutput]) -> None:
    """Equal streams, unless the reference itself is tied where they part; then each is greedy on its own stream."""
    ties = sum(count_ties(NAME, output) for output in outputs)
    different = sum(ours != theirs for ours, theirs in zip(streams(outputs), streams(reference), strict=True))
    assert different <= ties, f"{different} streams differ from the uninterrupted run and only {ties} ties were met"


def test_the_uninterrupted_run_is_greedy_on_the_uncached_model(reference: list[RequestOutput]) -> None:
    assert sum(count_ties(NAME, output) for output in reference) == 0


@pytest.mark.parametrize(("small", "policy", "depth"), matrix(), indirect=["small"])
def test_every_policy_gives_the_tokens_of_the_uninterrupted_run(
    small: LLM, reference: list[RequestOutput], policy: str, depth: int
) -> None:
    chunk = {"discard": 1, "improved_discard": 5, "swap": 7, "copy_ahead": 3}.get(policy)
    small.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=chunk)
    check(WORKLOAD.run(small, delay_s=0.003), reference)
    counters = small.counters
    assert counters.interceptions > 0
    assert policy in ("preserve", "heuristic_preserve") or counters.recomputed + counters.copied_out > 0, (
        "the pool was never short"
    )


@settings(max_examples=4)
@given(seed=st.integers(0, 1 << 30), depth=st.sampled_from([0, 1]), chunk=st.sampled_from([1, 3, 16, None]))
def test_any_residency_mix_gives_the_tokens_of_the_uninterrupted_run(
    small: LLM, reference: list[RequestOutput], seed: int, depth: int, chunk: int | None
) -> None:
    rng = random.Random(seed)
    mix = [rng.choice(list(Residency)) for _ in range(101)]

    def placement(sequence: Sequence, index: int) -> Residency:
        return mix[(17 * index + 5 * len(sequence.tokens)) % len(mix)]

    small.restart(Scripted(placement), pipeline_depth=depth, max_chunk_tokens=chunk)
    check(WORKLOAD.run(small, delay_s=0.001), reference)
