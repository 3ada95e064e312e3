"""States of recurrent layers on their way: rows begin from other slots, and states come back from the host as they left."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from jinfercept.models.load import load
from jinfercept.models.mesh import ModelMesh
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import Chunk, NewPages, Sample, Score, StepPlan, StepResult, WindowCopies
from tests.support.state_moves import check_random_moves
from tests.support.tiny_model import GOLDEN

VOCAB, SIZE, BUCKET, NUM_STATES = 128, 4, 80, 6
SHAPE = RunnerShape(
    num_pages=100,
    page_size=SIZE,
    max_num_seqs=3,
    max_model_len=120,
    buckets=(BUCKET,),
    layers_per_step=2,
    num_states=NUM_STATES,
)
PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (3, 120)).tolist()
PREFIX = 40
"""Tokens in whole pages."""


@cache
def loaded() -> Any:
    return load(GOLDEN / "qwen3_next", dtype="float32")


def runner(**sizes: Any) -> ModelRunner:
    made = ModelRunner(loaded().model, loaded().params, replace(SHAPE, **sizes))
    made.reset()
    return made


def chunk(slot: int, start: int, end: int, state: int, tokens: list[int], **fields: Any) -> Chunk:
    """Tokens with a score for each and a draw behind the last. The pages of a slot are its own from `own` on, and before that
    those of slot 0."""
    own, first = fields.pop("own", 0), start // SIZE
    pages = [1 + page + 30 * slot * (page * SIZE >= own) for page in range(-(-end // SIZE))]
    first = 0 if own else first
    new = NewPages(first, pages[first:], state, **fields)
    return Chunk(
        slot, start, tuple(tokens[start:end]), new, Sample(0.0, 0), Score(0, tuple(tokens[start + 1 : end + 1]), 2)
    )


def plan(*chunks: Chunk, **moves: Any) -> StepPlan:
    return StepPlan(0, BUCKET if chunks else 0, chunks, window=WindowCopies(**moves) if moves else None)


def run(made: ModelRunner, *plans: StepPlan) -> list[StepResult]:
    results = [made.collect(made.submit(each)) for each in plans]
    return [result for each, result in zip(plans, results, strict=True) if each.chunks]


def state(made: ModelRunner, slot: int) -> list[np.ndarray]:
    assert made.second is not None
    return [np.asarray(array[slot]) for of_layer in made.second.layers for array in of_layer]


def same(results: Sequence[StepResult], others: Sequence[StepResult]) -> None:
    assert [result.tokens for result in results] == [result.tokens for result in others]
    assert [result.scores for result in results] == [result.scores for result in others]


@pytest.mark.parametrize("length", [1, 72], ids=["a token", "more than a block"])
def test_a_chunk_that_reads_another_slot_computes_the_same_and_leaves_that_as_it_is(length: int) -> None:
    tokens, made, end = PROMPTS[0], runner(), PREFIX + length
    begin, rest = chunk(0, 0, PREFIX, 1, tokens), chunk(0, end, end + 3, 1, tokens)
    expected = run(made, plan(begin), plan(chunk(0, PREFIX, end, 1, tokens)), plan(rest))
    made.reset()
    results, kept = run(made, plan(begin)), state(made, 1)
    results += run(made, plan(chunk(0, PREFIX, end, 4, tokens, state_from=1)), plan(rest._replace(new_pages=())))
    same(results, expected)
    for array, was in zip(state(made, 1), kept, strict=True):
        np.testing.assert_array_equal(array, was)
    assert any(np.any(array != was) for array, was in zip(state(made, 4), kept, strict=True))
    made.close()


def test_rows_begin_from_the_same_state() -> None:
    """Sequences of the same first tokens and a checkpoint behind these; each has a chunk of another kind."""
    tokens, made = [PROMPTS[0][:PREFIX] + prompt[PREFIX:] for prompt in PROMPTS], runner()
    ends = [PREFIX + 1, PREFIX + 1, PREFIX + 70]
    begins = [plan(chunk(slot, 0, PREFIX, 1 + slot, tokens[slot])) for slot in range(3)]
    chunks = [chunk(slot, PREFIX, ends[slot], 1 + slot, tokens[slot]) for slot in range(3)]
    after = plan(*(chunk(slot, ends[slot], ends[slot] + 1, 1 + slot, tokens[slot]) for slot in range(3)))
    _, _, _, *expected = run(made, *begins, plan(*chunks), after)
    made.reset()
    first = chunk(0, 0, PREFIX, 6, tokens[0])
    forks = [chunk(slot, PREFIX, ends[slot], 1 + slot, tokens[slot], state_from=6, own=PREFIX) for slot in range(3)]
    _, *results = run(made, plan(first), plan(*forks), after)
    same(results, expected)
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_states_of_all_slots_are_where_they_were_moved(seed: int) -> None:
    check_random_moves(ModelMesh.default(), seed)
