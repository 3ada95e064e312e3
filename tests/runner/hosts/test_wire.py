"""Plans and masks survive the wire: a runner packs the same arrays for what arrives as for what was sent."""

from array import array
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.kv.page import PageCopy
from jinfercept.runner.hosts.wire import decode_masks, decode_plan, encode_masks, encode_plan
from jinfercept.runner.packing_samples import pack_samples, pack_slot, sampled_rows
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import (
    FROM_DEVICE,
    Chunk,
    DraftPlan,
    NewPages,
    Sample,
    Score,
    StepPlan,
    TokenHistory,
    WindowCopies,
    WindowEntries,
    draw_options,
)

VOCAB = 64
ids, numbers = st.integers(0, VOCAB - 1), st.integers(0, 1 << 20)
some_ids = st.lists(ids, max_size=5).map(tuple)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 1 << 31),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 3),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=4),
    bad_words_token_ids=st.lists(st.lists(ids, min_size=1, max_size=8), max_size=3),
    min_tokens=st.integers(0, 3),
    logprobs=st.none() | st.integers(0, 20),
)
histories = st.builds(TokenHistory, some_ids, st.just(((0, 1),)))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    sampling = draw(params)
    options = draw_options(sampling, frozenset(draw(some_ids))) if draw(st.booleans()) else None
    history = draw(histories) if options is not None and options.remembered and draw(st.booleans()) else None
    random_key = draw(st.integers(0, 2**64 - 1))
    forced = draw(st.none() | numbers)
    return Sample(sampling.temperature, random_key, options, draw(st.booleans()), history, forced)


slots = st.lists(numbers).map(lambda slots: array("i", slots))
chunks = st.builds(
    Chunk,
    slot=st.integers(0, 255),
    start=numbers,
    tokens=st.just((FROM_DEVICE,)) | st.lists(ids, min_size=1, max_size=9).map(tuple),
    new_pages=st.just(())
    | st.builds(
        NewPages,
        numbers,
        slots,
        state=st.integers(0, 3),
        window=st.just(()) | st.builds(WindowEntries, numbers, slots),
        state_from=st.integers(0, 3),
    ),
    sample=st.none() | samples(),
    score=st.none() | st.builds(Score, numbers, some_ids, st.integers(0, 20)),
    num_drafts=st.integers(0, 1),
    adapter=st.integers(0, 2),
)
copies = st.lists(st.builds(PageCopy, numbers, numbers, numbers), max_size=3).map(tuple)
plans = st.builds(
    StepPlan,
    number=st.integers(0, 1 << 40),
    bucket=numbers,
    chunks=st.lists(chunks, max_size=4).map(tuple),
    offload=copies,
    fetch=copies,
    drop=some_ids,
    window=st.none() | st.builds(WindowCopies, copies, copies, some_ids),
    draft=st.none() | st.builds(DraftPlan, st.booleans(), st.dictionaries(st.integers(0, 255), ids, max_size=3)),
)


def bare(plan: StepPlan) -> StepPlan:
    """The plan without its requests' options."""
    return replace(
        plan,
        chunks=tuple(
            chunk._replace(sample=chunk.sample and chunk.sample._replace(options=None)) for chunk in plan.chunks
        ),
    )


def slot_states(plan: StepPlan) -> list[bytes]:
    """The packed states of the slots that the plan's sequences enter."""
    entering = [chunk.sample for chunk in plan.chunks if chunk.sample is not None and chunk.sample.history is not None]
    return [
        pack_slot(sample.options, sample.history, VOCAB).tobytes()
        for sample in entering
        if sample.options is not None and sample.history is not None
    ]


@given(plans)
def test_a_runner_packs_the_same_for_a_plan_that_crossed_the_wire(plan: StepPlan) -> None:
    arrived = decode_plan(encode_plan(plan))
    assert bare(arrived) == bare(plan)
    assert (pack_samples(sampled_rows(arrived.chunks), 8, 9) == pack_samples(sampled_rows(plan.chunks), 8, 9)).all()
    assert slot_states(arrived) == slot_states(plan)
    reported = [
        [chunk.sample.options and chunk.sample.options.params.logprobs for chunk in step_plan.chunks if chunk.sample]
        for step_plan in (arrived, plan)
    ]
    assert reported[0] == reported[1]


def test_a_decode_row_takes_few_bytes() -> None:
    row = Chunk(200, 4000, (FROM_DEVICE,), (), Sample(0.7, 0xFFFFFFFF))
    assert len(encode_plan(StepPlan(7, 256, (row,) * 256))) < 35 * 256


@given(st.dictionaries(st.integers(0, 255), st.lists(st.sampled_from((0, 5, 0xFFFFFFFF)), min_size=9, max_size=9)))
def test_masks_cross_the_wire(rows: dict[int, list[int]]) -> None:
    masks = {row: np.array(words, np.uint32) for row, words in rows.items()}
    arrived = decode_masks(encode_masks(masks))
    assert list(arrived) == list(masks)
    for row, words in masks.items():
        assert arrived[row].dtype == np.uint32
        assert (arrived[row] == words).all()
