"""The wire form of plans and masks: bytes that another process of the same version turns into what its runner executes.

It is MessagePack, without code and without type names: fields stand in the order of their classes. A plan has what a runner
reads and nothing else. Of a request's sampling parameters these are the numbers of a draw. In the step in which a sequence
enters its slot they are also the biases, the allowed tokens and the bad words, which the device keeps from then on.
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from msgpack import packb, unpackb

from jinfercept.kv.page import PageCopies, PageCopy
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import (
    Chunk,
    DraftPlan,
    DrawOptions,
    Masks,
    NewPages,
    Sample,
    Score,
    StepPlan,
    TokenHistory,
    WindowCopies,
    WindowEntries,
)

VERSION = 12
"""Changes with the form; processes of different versions refuse each other at the start."""

_REPORTS = ("return_processed_logprobs", "return_kept_tokens")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_DRAW = ("top_k", "top_p", "min_p", *_PENALTIES, "logprobs", *_REPORTS)
"""Sampling parameters that every draw reads."""
_draw_values = attrgetter(*_DRAW)


def encode_plan(plan: StepPlan) -> bytes:
    chunks = [
        chunk if chunk.sample is None or chunk.sample.history is None else _entering(chunk, chunk.sample)
        for chunk in plan.chunks
    ]
    window = () if plan.window is None else _moves(plan.window)
    fields = (plan.number, plan.bucket, chunks, _moves(plan), window, plan.draft)
    return packb(fields, default=_plain)  # pyright: ignore[reportReturnType] # bytes, without autoreset


def decode_plan(body: bytes) -> StepPlan:
    """The plan that `encode_plan` was given, as far as a runner reads it."""
    number, bucket, chunks, (offload, fetch, drop), window, draft = _unpacked(body)
    if window:
        window = WindowCopies(_copies(window[0]), _copies(window[1]), window[2])
    moves = _copies(offload), _copies(fetch), drop, window or None
    return StepPlan(number, bucket, tuple(map(_chunk, chunks)), *moves, draft and DraftPlan(*draft))


def encode_masks(masks: Masks) -> bytes:
    return packb([(row, np.asarray(words, "<u4").tobytes()) for row, words in masks.items()])  # pyright: ignore[reportReturnType]


def decode_masks(body: bytes) -> Masks:
    return {row: np.frombuffer(words, "<u4") for row, words in _unpacked(body)}


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Encode a mapping of plain values: texts, numbers, and mappings of these."""
    return packb(values)  # pyright: ignore[reportReturnType]


def decode_values(body: bytes) -> dict[str, Any]:
    """The mapping that `encode_values` was given. Raises `ValueError` for bytes that are none.

    Keys are texts or bytes, whose hashes a sender cannot choose; others could make a mapping take minutes.
    """
    values = unpackb(body, use_list=False, strict_map_key=True)
    if not isinstance(values, dict):
        raise ValueError(f"a mapping is expected; got {type(values).__name__}")
    return values


# -- the parts of a plan -----------------------------------------------------------------------------------------------


def _unpacked(body: bytes) -> Any:
    return unpackb(body, use_list=False, strict_map_key=False)


def _entering(chunk: Chunk, sample: Sample) -> tuple[object, ...]:
    assert sample.options is not None
    params = sample.options.params
    slot = (params.logit_bias, params.allowed_token_ids, params.bad_words_token_ids, sample.options.end_token_ids)
    return (*chunk[:4], (*sample[:4], (sample.history, slot), sample.forced), *chunk[5:])


def _plain(options: object) -> object:
    if isinstance(options, array):
        return options.tobytes()
    if not isinstance(options, DrawOptions):
        raise TypeError(f"a plan has no {type(options).__name__}")
    return (options.remembered, *_draw_values(options.params))


def _chunk(fields: tuple[Any, ...]) -> Chunk:
    slot, start, tokens, new_pages, sample, score, num_drafts, adapter = fields
    if new_pages:
        first, slots, state, window, state_from = new_pages
        if window:
            window = WindowEntries(window[0], array("i", window[1]))
        new_pages = NewPages(first, array("i", slots), state, window, state_from)
    sample, score = sample and _sample(*sample), score and Score(*score)
    return Chunk(slot, start, tokens, new_pages, sample, score, num_drafts, adapter)


def _sample(
    temperature: float,
    random_key: int,
    numbers: Any,
    forbids_end: bool,
    entering: Any,
    forced: int | None,
) -> Sample:
    if entering is None:
        options = None if numbers is None else _known_options(numbers)
        return Sample(temperature, random_key, options, forbids_end, None, forced)
    history, (biases, allowed, bad, end_token_ids) = entering
    slot = {"logit_bias": biases, "allowed_token_ids": allowed, "bad_words_token_ids": bad}
    options = _options(numbers, slot, end_token_ids)
    return Sample(temperature, random_key, options, forbids_end, TokenHistory(*history), forced)


def _options(numbers: tuple[Any, ...], slot: Mapping[str, Any], end_token_ids: tuple[int, ...]) -> DrawOptions:
    remembered, *values = numbers
    params = SamplingParams(**dict(zip(_DRAW, values, strict=True)), **slot)
    return DrawOptions(params, end_token_ids, remembered)


@lru_cache(4096)  # a request has the same options in all its steps
def _known_options(numbers: tuple[Any, ...]) -> DrawOptions:
    return _options(numbers, {}, ())


def _moves(moves: StepPlan | WindowCopies) -> tuple[object, ...]:
    return _columns(moves.offload), _columns(moves.fetch), moves.drop


def _columns(copies: Sequence[PageCopy]) -> tuple[bytes, bytes, bytes] | tuple[()]:
    if not copies:
        return ()
    columns = PageCopies.of(copies)
    return columns.device.tobytes(), columns.host.tobytes(), columns.contexts.tobytes()


def _copies(columns: tuple[bytes, bytes, bytes] | tuple[()]) -> Sequence[PageCopy]:
    return PageCopies.from_columns(*columns) if columns else ()
