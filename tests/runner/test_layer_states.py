"""States of recurrent layers on their way: rows begin from other slots, and states come back from the host as they left."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jinfercept.kv.page import PageCopy
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


@pytest.mark.parametrize("pinned", [True, False])
def test_a_sequence_goes_on_from_a_state_that_was_on_the_host(pinned: bool) -> None:
    """It leaves beside another one's compute, whose state takes its slot, and comes back to other slots."""
    made = runner(pinned_memory=pinned)
    own, other = PROMPTS[0], PROMPTS[1]
    parts = [chunk(0, 0, PREFIX, 1, own), chunk(0, PREFIX, 60, 1, own), chunk(0, 60, 61, 1, own)]
    expected = run(made, *map(plan, parts))
    alone = run(made, *(plan(chunk(1, start, start + 9, 2, other)) for start in (0, 9, 18)))
    made.reset()
    first = run(made, plan(parts[0]))
    moving = run(
        made,
        plan(chunk(1, 0, 9, 2, other), offload=[PageCopy(1, 0)]),
        plan(offload=[PageCopy(2, 1)]),
        plan(fetch=[PageCopy(1, 1)]),
        plan(chunk(1, 9, 18, 1, other), fetch=[PageCopy(3, 0)]),
        plan(fetch=[PageCopy(5, 0), PageCopy(6, 1)], drop=(0,), offload=[PageCopy(1, 0)]),
        plan(fetch=[PageCopy(2, 0)], drop=(0, 1)),
        plan(chunk(1, 18, 27, 2, other)),
    )
    same(moving, alone)
    assert made.second is not None
    assert not made.second.host
    for slot in (3, 5):
        returned = chunk(0, PREFIX, 60, slot, own)
        same(first + run(made, plan(returned), plan(parts[2]._replace(new_pages=()))), expected)
    made.close()


def test_transfers_of_states_are_hidden_as_those_of_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made, put, seen = runner(), jax.device_put, list[str]()
    calls = type(made.executables).__getitem__

    def noting_call(run: Any, key: Any) -> Any:
        seen.append(key if isinstance(key, str) else key[0])
        return calls(run, key)

    def noting_put(what: Any, where: Any) -> Any:
        leaves = jax.tree.leaves(what)
        seen.append("upload" if isinstance(leaves[0], np.ndarray) else f"{len(leaves)} to {where.memory_kind}")
        return put(what, where)

    run(made, plan(chunk(0, 0, 8, 1, PROMPTS[0]), offload=[PageCopy(2, 0)]))
    monkeypatch.setattr(type(made.executables), "__getitem__", noting_call)
    monkeypatch.setattr(jax, "device_put", noting_put)
    chunks = (chunk(0, 8, 16, 1, PROMPTS[0])._replace(score=None),)
    moves = WindowCopies([PageCopy(3, 1)], [PageCopy(4, 0)])
    made.submit(StepPlan(0, BUCKET, chunks, fetch=(), offload=(PageCopy(50, 0),), window=moves))
    out = ["gather", "1 to pinned_host", "gather", "1 to pinned_host"]
    expected = ["embed", "1 to device", *out, "layers", "layers", "scatter", "head", "sample"]
    assert seen == expected, "states of one dtype are one array"
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_states_of_all_slots_are_where_they_were_moved(seed: int) -> None:
    check_random_moves(ModelMesh.default(), seed)
