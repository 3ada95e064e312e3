"""Draws a plan's tokens: the logits, the draws, and the sampling state by sequence slot.

A slot's state is written from the host's tokens when a sequence with options gets the slot. After that every draw adds its own
token on the device, so that it counts before the host has read it.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial, wraps
from itertools import accumulate, product
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jinfercept.models.mesh import beside, over_devices, place
from jinfercept.models.protocol import ServedModel, Weights
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing import CommonShape, Step
from jinfercept.runner.packing_samples import (
    SampledRow,
    draw_needs,
    pack_positions,
    pack_samples,
    pack_slot,
    sampled_rows,
    slot_shapes,
    slot_size,
    unpack_samples,
    unpack_slot,
)
from jinfercept.runner.sampling import (
    KINDS,
    Kind,
    Logits,
    SampleRows,
    Slots,
    distinct,
    mask_words,
    read_report,
    read_reports,
    remember,
    report,
    sample,
    shape_logits,
)
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import Chunk, Masks, TokenLogprobs

Steps = Sequence[tuple[Step, Set[Hashable]]]
"""Steps, with the keys of their executables before the head."""


class Samples(NamedTuple):
    """A plan's sampled rows, and the step that computes the plan."""

    packed: Int32[np.ndarray, "fields R"]  # see `pack_samples`; as many columns as the executables have rows
    reported: tuple[SamplingParams | None, ...]  # by row, what is reported of the draw; None: nothing is
    forced: Masks  # by row, masks that leave one token
    step: Step
    kind: Kind  # at least the simplest that serves all rows
    remembered: bool  # whether the state of a row's slot applies


class Hidden(NamedTuple):
    """The output of a plan's forward pass, on the device, which sampling reads."""

    x: Array  # `[T, E]`, of the last layer
    chunks: tuple[Chunk, ...]
    common: Array  # the common part of the step's upload
    samples: Samples
    logits: Array | None  # `[R, V]`, of the sampled rows; None if nothing is sampled


class Drawn(NamedTuple):
    """The tokens and reports of a plan, on the device. None: the plan has none."""

    tokens: Array | None = None  # `[R]`
    reported: tuple[SamplingParams | None, ...] = ()
    reports: Array | None = None  # `[R, columns]`, see `sampling.report`
    kept: Array | None = None  # `[R, words]`, see `sampling.processed`
    # of every chunk with a score: the number of likeliest tokens, the number of targets, and their reports
    scores: tuple[tuple[int, int, tuple[Array, ...]], ...] = ()
    drafts: Array | None = None  # `[S, drafts]`, of the layer that drafts
    drafted_rows: tuple[int, ...] = ()  # the rows of `drafts` that are sampled chunks, in order


@final
class Sampler:
    """Draws tokens for the sampled rows of plans.

    Args:
        run: executables, among them those of `add_sampler`.
        row_counts: numbers of rows that have executables, ascending.
        vocab_size: columns of the logits.

    Attributes:
        last_tokens: the token drawn last, by slot; the last slot is scratch.
    """

    def __init__(
        self,
        run: Executables,
        common_shape: CommonShape,
        row_counts: tuple[int, ...],
        num_slots: int,
        vocab_size: int,
        home: jax.sharding.Sharding,
    ) -> None:
        self._common_shape = common_shape
        self._run, self._row_counts, self._num_slots, self._home = run, row_counts, num_slots, home
        self._vocab_size = vocab_size
        self._no_masks = {rows: place(self._ones(rows), home) for rows in row_counts}
        self._no_bounds = {rows: place(np.full(rows, -np.inf, np.float32), home) for rows in row_counts}
        self.reset()

    def reset(self) -> None:
        """Clear all slots."""
        shapes = slot_shapes(self._num_slots, self._vocab_size)
        self._slots: Slots = place(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes), self._home)
        self.last_tokens: Array = place(np.zeros(self._num_slots + 1, np.int32), self._home)

    def close(self) -> None:
        """Free the slots' arrays."""
        for array in (*self._slots, self.last_tokens):
            array.delete()

    def pack(self, chunks: tuple[Chunk, ...], steps: Steps) -> Samples:
        """Pack a plan's sampled rows for the step's upload. Dispatches the history of new slots, in uploads of their own.

        `steps` can compute the plan, in ascending order; the first one whose executables are all compiled is chosen.
        """
        samples = sampled_rows(chunks)
        counts = self._row_counts[bisect_left(self._row_counts, len(samples)) :] if samples else (0,)
        packed = pack_samples(samples, counts[0], self._num_slots)
        reported, forced = [None] * len(samples), {}
        if [sample for sample in samples if sample.sample.options is not None]:
            reported, forced = self._enter(samples)
        step, (kind, remembered) = steps[0][0], draw_needs(samples)
        if self._run.missing:
            names = ["shape"]  # masks are made while the step computes
            names += ["remember"] if remembered else []
            names += ["logprobs"] if any(reported) else []
            has_scores = any(chunk.score is not None for chunk in chunks)
            step, num_rows, kind = self._compiled(steps, counts, kind, names, has_scores=has_scores)
            if num_rows != counts[0]:
                packed = pack_samples(samples, num_rows, self._num_slots)
        return Samples(packed, tuple(reported), forced, step, kind, remembered)

    def _enter(self, samples: Sequence[SampledRow]) -> tuple[list[SamplingParams | None], dict[int, np.ndarray]]:
        reported: list[SamplingParams | None] = []
        forced: dict[int, np.ndarray] = {}
        for row, (_, slot, _, entry) in enumerate(samples):
            if entry.forced is not None:
                forced[row] = self._only(entry.forced)
            if entry.options is not None and entry.history is not None:
                assert slot is not None, "the host does not draft for a slot with state"
                vector = pack_slot(entry.options, entry.history, self._vocab_size)
                self._slots = self._run["enter"](self._slots, *place((np.array(slot, np.int32), vector), self._home))
            params = None if entry.options is None else entry.options.params
            reported.append(params if params is not None and params.reports_draws else None)
        return reported, forced

    def _compiled(
        self, steps: Steps, counts: Sequence[int], least: Kind, names: Sequence[str], *, has_scores: bool
    ) -> tuple[Step, int, Kind]:
        missing = self._run.missing
        for (step, keys), num_rows, kind in product(steps, counts, KINDS[KINDS.index(least) :]):
            needed = {*keys, ("head", step[0], num_rows), *[(name, num_rows) for name in names]}
            needed.add(("draft rows", step, num_rows))
            if has_scores:
                num_scored = self._num_scored(step[0])
                needed |= {("head", step[0], num_scored), ("logprobs", num_scored)}
            draw = "sample", num_rows, kind
            can_draw = draw in self._run.ready if kind != least else draw not in missing
            if num_rows <= step[0] and can_draw and missing.isdisjoint(needed):
                return step, num_rows, kind
        return steps[0][0], counts[0], least  # it waits

    def _num_scored(self, bucket: int) -> int:
        return max(rows for rows in self._row_counts if rows <= bucket)

    def head(
        self, x: Float[Array, "T E"], chunks: tuple[Chunk, ...], samples: Samples, common: Array, params: Weights
    ) -> Hidden:
        """Dispatch the end of a plan's forward pass: the logits of its sampled rows. `samples` come from `pack` for the same
        plan, and are in `common`; `params` is `Params.head`."""
        num_rows = samples.packed.shape[1]
        logits = self._run["head", x.shape[0], num_rows](params, x, common) if num_rows else None
        return Hidden(x, chunks, common, samples, logits)

    def draw(self, hidden: Hidden, params: Weights, masks: Masks) -> Drawn:
        """Dispatch the sampling of a plan, and its reports. `hidden` comes from `head` for the same plan, `params` is
        `Params.head`."""
        drawn = Drawn() if hidden.logits is None else self._sample(hidden.logits, hidden.samples, hidden.common, masks)
        if [chunk for chunk in hidden.chunks if chunk.score is not None]:
            drawn = drawn._replace(scores=tuple(self._scores(hidden.x, hidden.chunks, params)))
        return drawn

    def read(
        self, drawn: Drawn
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...], tuple[tuple[TokenLogprobs, ...], ...]]:
        """Wait for tokens, log probabilities and scores, as `StepResult` has them."""
        tokens = () if drawn.tokens is None else tuple(np.asarray(drawn.tokens)[: len(drawn.reported)].tolist())
        reported = ()
        if drawn.reports is not None:
            reported = tuple(read_reports(drawn.reports, drawn.kept, drawn.reported, self._vocab_size))
        scores = []
        for num_best, count, reports in drawn.scores:
            rows = np.concatenate([np.asarray(report) for report in reports])[:count]
            scores.append(tuple(read_report(row, num_best) for row in rows))
        return tokens, reported, tuple(scores)

    def _sample(self, logits: Array, samples: Samples, common: Array, masks: Masks) -> Drawn:
        # The host chooses among three kinds of draws, apart from options that change logits (`shape`) and from their state
        # (`remember`): a conditional in an executable would make a GPU's host wait for the predicate. A step computes nothing
        # that no row asks for, and the parts together compile about as long as one executable with conditionals. Compiled for
        # an H100, 64 rows take 3 kernels (greedy), 4 (drawn) or 79 (filtered, see `sampling`), 12 for `shape`, 3 for
        # `remember`, and 15 for `logprobs`.
        packed, reported, forced, _, kind, remembered = samples
        masks = {**masks, **forced} if forced else masks
        num_rows, shaped = packed.shape[1], logits
        if masks or remembered:
            mask = self._masked(num_rows, masks) if masks else self._no_masks[num_rows]
            shaped = self._run["shape", num_rows](logits, mask, self._slots, common)
        draw = self._run["sample", num_rows, kind]
        tokens, self.last_tokens, *bounds = draw(shaped, self.last_tokens, common)
        tokens.copy_to_host_async()
        if remembered:
            self._slots = self._run["remember", num_rows](self._slots, tokens, common)
        reports, kept_mask = None, None
        if any(reported):
            bound = bounds[0] if bounds else self._no_bounds[num_rows]
            reports, kept_mask = self._run["logprobs", num_rows](logits, shaped, bound, tokens, common)
            reports.copy_to_host_async()
        return Drawn(tokens, reported, reports, kept_mask)

    def _masked(self, num_rows: int, masks: Masks) -> Array:
        mask = self._ones(num_rows)
        for row, words in masks.items():
            mask[row] = words
        return place(mask, self._home)  # uploaded now, since masks are computed while the device runs the step

    def _scores(
        self, x: Float[Array, "T E"], chunks: tuple[Chunk, ...], params: Weights
    ) -> list[tuple[int, int, tuple[Array, ...]]]:
        size = x.shape[0]
        num_rows, scores = self._num_scored(size), []
        for chunk, end in zip(chunks, accumulate(len(chunk.tokens) for chunk in chunks), strict=True):
            if chunk.score is None:
                continue
            targets, reports = chunk.score.targets, []
            begin = end - len(chunk.tokens) + chunk.score.first
            for first in range(0, len(targets), num_rows):
                part = np.array(targets[first : first + num_rows], np.int32)
                packed = pack_positions(range(begin + first, begin + first + len(part)), num_rows, self._num_slots)
                scored = (self._common_shape.pack(packed, ()), np.pad(part, (0, num_rows - len(part))))
                common, tokens = place(scored, self._home)
                logits = self._run["head", size, num_rows](params, x, common)
                report, _ = self._run["logprobs", num_rows](logits, logits, self._no_bounds[num_rows], tokens, common)
                reports.append(report)
                reports[-1].copy_to_host_async()
            scores.append((chunk.score.num_best, len(targets), tuple(reports)))
        return scores

    def _only(self, token_id: int) -> np.ndarray:
        words = np.zeros(mask_words(self._vocab_size), np.uint32)
        words[token_id // 32] = np.uint32(1 << token_id % 32)
        return words

    def _ones(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, mask_words(self._vocab_size)), 0xFFFFFFFF, np.uint32)


def add_sampler(
    run: Executables,
    model: ServedModel,
    params: Weights,
    x_by_size: Mapping[int, jax.ShapeDtypeStruct],
    common_shape: CommonShape,
    row_counts: tuple[int, ...],
    num_slots: int,
    *,
    drafts_for: int = 0,
    num_drawn: int | None = None,
) -> None:
    """Add every executable that sampling can need.

    Args:
        params: `Params.head`, or shapes.
        x_by_size: the shape of the last layer's output, by tokens of the bucket.
        drafts_for, num_drawn: see `RunnerShape`.
    """
    home, vocab_size = beside(jax.tree.leaves(params)[0]), drafts_for or model.config.vocab_size

    def struct(dims: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=home)

    slots = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), slot_shapes(num_slots, vocab_size))
    last_tokens = struct((num_slots + 1,), jnp.int32)

    common = struct((common_shape.size,), jnp.int32)

    def add(key: tuple[Any, ...], function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> None:
        on_rows, arguments = _on_rows(key[0], common_shape, rows, function), (*arguments, common)
        run.add(key, over_devices(on_rows, arguments), *arguments, donate=donate)

    if not drafts_for:
        entering = slots, struct((), jnp.int32), struct((slot_size(vocab_size),), jnp.int32)
        run.add("enter", over_devices(unpack_slot, entering), *entering, donate=(0,))
    for rows in row_counts:
        for size, x in x_by_size.items():
            if rows <= size:
                add(("head", size, rows), partial(_head, model, vocab_size), params, x)
        logits, mask = struct((rows, vocab_size), jnp.float32), struct((rows, mask_words(vocab_size)), jnp.uint32)
        tokens = struct((rows,), jnp.int32)
        for kind in KINDS[:2] if drafts_for else KINDS:
            add(("sample", rows, kind), partial(_sample, kind, num_drawn), logits, last_tokens, donate=(1,))
        if drafts_for:
            continue
        add(("shape", rows), shape_logits, logits, mask, slots)
        add(("remember", rows), remember, slots, tokens, donate=(0,))
        add(("logprobs", rows), report, logits, logits, struct((rows,), jnp.float32), tokens)


def slots_bytes(num_slots: int, vocab_size: int) -> int:
    """Device memory of the slots' state, in bytes."""
    last_tokens = jax.ShapeDtypeStruct((num_slots + 1,), jnp.int32)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in (*slot_shapes(num_slots, vocab_size), last_tokens))


def _on_rows(name: str, common_shape: CommonShape, num_rows: int, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # the arguments keep their names in what is compiled
    def run(*arguments: Any) -> Any:
        *others, common = arguments
        with jax.named_scope(name):
            return function(*others, unpack_samples(common_shape.samples(common, num_rows)))

    run.__name__ = name
    return run


def _head(model: ServedModel, vocab_size: int, params: Weights, x: Float[Array, "T E"], rows: SampleRows) -> Logits:
    logits = model.head(params, x[rows.token_index])[:, :vocab_size]
    lacking = vocab_size - logits.shape[1]
    return jnp.pad(logits, ((0, 0), (0, lacking)), constant_values=-jnp.inf) if lacking else logits


def _sample(
    kind: Kind,
    num_drawn: int | None,
    logits: Logits,
    last_tokens: Int32[Array, "slots"],
    rows: SampleRows,
) -> tuple[Array, ...]:
    # rows of the scratch slot, the last one, write nothing
    places = distinct(jnp.where(rows.slot < len(last_tokens) - 1, rows.slot, len(last_tokens)), len(last_tokens))
    tokens, bound = sample(logits[:, :num_drawn], rows, kind)
    last_tokens = last_tokens.at[places].set(tokens, mode="drop", unique_indices=True)
    return (tokens, last_tokens) if bound is None else (tokens, last_tokens, bound)
