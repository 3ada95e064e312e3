"""Executes plans: page transfers, the forward pass in groups of layers, sampling.

Every executable has a static shape. It is compiled by `warm_up`, or in the background while steps run on larger ones. For each
token bucket there are an embedding and a group of `layers_per_step` layers (and one remainder group), and both once more for
steps of decode rows only, where attention has other code for these. For each number of sampled rows there are a head and the
samplers. Transfers have executables of their own.

A plan is dispatched in two phases: `forward`, then `sample` with the masks of its constrained rows, which the engine computes
while the device runs the forward pass. Only `collect` waits for the device.
"""

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import batched
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jaxtyping import Array, Int

from jinfercept.errors import EngineError
from jinfercept.models.in_memory import shapes_of
from jinfercept.models.mesh import beside, mesh_of, place
from jinfercept.models.protocol import Params, ServedModel, num_draft_layers, states_of
from jinfercept.models.quantized import weights_of
from jinfercept.runner.draft_layer import Assistant
from jinfercept.runner.executables import Executables, Progress, silent
from jinfercept.runner.packing import MOST_TRANSFERS, CommonShape, enter, pack
from jinfercept.runner.page_transfers import slot_bytes, transfer_sizes
from jinfercept.runner.pools import Pool, pool_shapes
from jinfercept.runner.sampler import Drawn, Hidden, Sampler, Samples
from jinfercept.runner.sampling import KINDS, Kind
from jinfercept.runner.shape import RunnerShape
from jinfercept.runner.steps import (
    RowExperts,
    add_steps,
    call_weights,
    num_computed,
    step_table,
)
from jinfercept.sched.plan import FROM_DEVICE, Chunk, DraftPlan, Masks, Sample, StepPlan, StepResult, WindowCopies

FIRST_PROMPT = 64
"""Tokens of a short first prompt, whose bucket is compiled before it arrives."""


class ForwardTicket(NamedTuple):
    """A plan whose transfers and forward pass were dispatched."""

    hidden: Hidden | None  # what sampling reads; None: the plan computes nothing
    submitted_s: float  # when `forward` was called, in monotonic seconds
    drafts: tuple[tuple[int, ...], ...] = ()  # of every chunk that awaited them
    experts: tuple[Array, ...] = ()  # an array for each group of layers
    batch: Array | None = None  # the step's upload on the device, for the layer that drafts
    draft: DraftPlan | None = None


class StepTicket(NamedTuple):
    """A plan that was dispatched in full, with the time and the experts of its `ForwardTicket`."""

    drawn: Drawn
    submitted_s: float
    experts: tuple[Array, ...] = ()


@final
class ModelRunner:
    """One model on the devices where its weights lie. `warm_up` or `reset` comes before its first plan.

    Args:
        params: the weights; several devices cut the pages by KV head.
        attention: implementation of attention, see `models.attention`.
        executables: the set to which the runner adds its own; None: a new one.
        assistant: drafts behind the steps; None: there is none.

    Attributes:
        device: the first one of this process.
        owns_params: whether no caller holds the arrays of the served weights, so that the next update overwrites them.
        kv: the pages, without those in the pool for windows.
        second: the pages in the pool for windows, or the states of recurrent layers; None: there are none.
        drafter: makes the drafts that plans await; None: there is no draft model.
        drafting: whether the draft model computes every plan too. A change forgets no KV, so `reset` has to follow.
    """

    def __init__(
        self,
        model: ServedModel,
        params: Params,
        shape: RunnerShape,
        *,
        attention: str = "auto",
        executables: Executables | None = None,
        assistant: Assistant | None = None,
    ) -> None:
        config = model.config
        self._model, self._shape = model, shape
        self._homes = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("device"), params)
        self._groups, self._assistant = shape.groups(num_computed(model)), assistant
        kinds_of_drafts = (True,) if assistant is not None else (False, True) if num_draft_layers(config) else ()
        self.use(params)  # committed, as the executables expect
        self.owns_params, self.weight_shapes = False, shapes_of(self.params)
        leaf = weights_of(self.params.embed)[0]
        self.device = mesh_of(leaf).local_devices[0]
        sizes = transfer_sizes(self.device.platform, shape.staging_pages)
        self._common_shape = CommonShape(shape.sample_rows[-1], sizes[0])
        own, *others = pool_shapes(model, shape, leaf)
        pages: dict[str, Any] = {"sizes": sizes, "staging_pages": shape.staging_pages}
        pages |= {"pinned": shape.pinned_memory, "moved_pages": shape.moved_pages}
        self.kv = Pool(own, self._common_shape, **pages)
        self._tables = np.zeros((shape.max_num_seqs, shape.bucket(1).pages_per_row), np.int32)
        self._window_tables = np.zeros_like(self._tables) if shape.num_window_pages else None
        self._state_slots = None
        if others and not shape.num_window_pages:
            self._state_slots = np.zeros(shape.max_num_seqs, np.int32)
            most_moved = max(1, shape.moved_pages * self.kv.page_bytes // slot_bytes(states_of(model), leaf.dtype))
            pages = {"pinned": shape.pinned_memory, "moved_pages": most_moved}
        self.second = Pool(others[0], self._common_shape, **pages) if others else None
        self._pools = (self.kv,) if self.second is None else (self.kv, self.second)
        self.executables = Executables() if executables is None else executables
        self.drafter: ModelDrafter | None = None
        self.drafting = True
        self._calls = step_table(model, shape, attention, leaf)
        self._steps = {  # that can compute a plan, by its bucket and whether it has decode rows only; its own first
            (bucket, decodes): [
                (
                    step,
                    {
                        calls.embed,
                        *(group.key for group in calls.groups),
                        *(("draft layer", step, drafts) for drafts in kinds_of_drafts),
                    },
                )
                for step, calls in self._calls.items()
                if step[0] >= bucket and step[1] <= decodes
            ]
            for bucket in (0, *shape.buckets)
            for decodes in (False, True)
        }
        self._home = beside(leaf)
        self._no_tokens = place(np.zeros(shape.sample_rows[0], np.int32), self._home)
        self._is_alone = mesh_of(leaf).size == 1  # a call uploads to one device itself, in less time than `place`
        self._sampler = Sampler(
            self.executables,
            self._common_shape,
            shape.sample_rows,
            shape.max_num_seqs,
            shape.drafts_for or config.vocab_size,
            self._home,
        )
        add_steps(self.executables, model, shape, attention, self.params, assistant)
        self.kv.add_executables(self.executables)
        if self.second is not None:
            self.second.add_executables(self.executables.under("windows" if shape.num_window_pages else "states"))

    def forward(self, plan: StepPlan, last_tokens: Int[Array, "slots"] | None = None) -> ForwardTicket:
        """Dispatch a plan's transfers, layers and head, in the order of `StepPlan`. A plan that awaits drafts waits for the
        draft model.

        `last_tokens` has, by slot, the token that `FROM_DEVICE` stands for; None: the one drawn last.
        """
        submitted_s, drafts = time.monotonic(), ()
        if not self.params.embed:
            raise EngineError("the model has no weights: an update or a sleep lost them", fix="update_weights(params)")
        if last_tokens is None:
            last_tokens = self._sampler.last_tokens
        if self.drafter is not None and self.drafting:
            plan, drafts = self.drafter.fill(plan, last_tokens)
        moving, transfers = list[Pool](), list[np.ndarray]()
        for kv, moves in zip(self._pools, (plan, plan.window or WindowCopies()), strict=False):
            if moves.fetch or moves.drop or moves.offload or kv.is_busy:
                moving.append(kv)
                transfers += kv.begin(moves.fetch, moves.drop, moves.offload, first_transfer=len(transfers))
        decodes = not [chunk for chunk in plan.chunks if len(chunk.tokens) != 1]
        samples = self._sampler.pack(plan.chunks, self._steps[plan.bucket, decodes])
        groups = [*batched(transfers, MOST_TRANSFERS)] or [()]  # of more transfers than an upload holds
        commons = [self._common_shape.pack(samples.packed, group) for group in groups]
        if plan.chunks:
            enter(plan.chunks, self._tables, self._state_slots, self._window_tables)
            hidden, experts, batch = self._forward(plan, last_tokens, samples, commons, moving)
            return ForwardTicket(hidden, submitted_s, drafts, experts, batch, plan.draft)
        self._move(commons, moving)  # and wait: there is no compute to hide the transfers
        return ForwardTicket(None, submitted_s)

    def _move(self, commons: list[np.ndarray], moving: list[Pool]) -> None:
        uploaded = place(commons, self._home)
        for kv in moving:
            kv.commons = uploaded
            kv.fetch()
            kv.offload()
            kv.scatter()
        for kv in moving:
            kv.wait()

    def sample(self, forward: ForwardTicket, masks: Masks) -> StepTicket:
        hidden = forward.hidden
        drawn = Drawn() if hidden is None else self._sampler.draw(hidden, self.params.head, masks)
        if forward.draft is not None and hidden is not None:
            drawn = self._drafted(forward, forward.draft, hidden, drawn)
        return StepTicket(drawn, forward.submitted_s, forward.experts)

    def _drafted(self, forward: ForwardTicket, plan: DraftPlan, hidden: Hidden, drawn: Drawn) -> Drawn:
        assistant = self._assistant
        if assistant is not None and not plan.drafts:
            return drawn
        step, run, params = hidden.samples.step, self.executables, self.params
        tokens = self._no_tokens if drawn.tokens is None else drawn.tokens
        rows = run["draft rows", step, tokens.shape[0]](forward.batch, hidden.common, tokens)
        *layers, pages = self.kv.layers
        weights = params.layers[-1], params.embed, params.head
        if assistant is not None:
            weights, pages = assistant.weights(params), assistant.pages(self._model, self._layers())
        drafts, written = run["draft layer", step, plan.drafts](
            *weights, hidden.x, rows, pages, forward.batch, hidden.common
        )
        if assistant is None:
            self.kv.layers = (*layers, written)
        if plan.drafts:
            drafts.copy_to_host_async()
            drafted = tuple([row for row, chunk in enumerate(hidden.chunks) if chunk.sample is not None])
            drawn = drawn._replace(drafts=drafts, drafted_rows=drafted)
        return drawn

    def _layers(self) -> dict[int, Any]:
        """The pages and states of all layers that have their own, by place."""
        return {place: array for kv in self._pools for place, array in zip(kv.places, kv.layers, strict=True)}

    def submit(self, plan: StepPlan) -> StepTicket:
        """Dispatch both phases of a plan without constrained rows."""
        return self.sample(self.forward(plan), {})

    def collect(self, ticket: StepTicket) -> StepResult:
        tokens, logprobs, scores = self._sampler.read(ticket.drawn)
        experts = RowExperts(np.concatenate(ticket.experts, axis=1)) if ticket.experts else None
        drafts, drawn = (), ticket.drawn
        if drawn.drafts is not None:
            drafts = tuple(map(tuple, np.asarray(drawn.drafts)[list(drawn.drafted_rows)].tolist()))
        return StepResult(tokens, time.monotonic() - ticket.submitted_s, logprobs, scores, experts, drafts)

    def use(self, params: Params) -> None:
        """Use other weights of the same structure, shapes and dtypes from the next plan on. All KV stays."""
        self.params = jax.device_put(params, self._homes)
        # flattened once, not at every step
        layers = self.params.layers
        self._leaves = {group: tuple(jax.tree.leaves(call_weights(layers[slice(*group)]))) for group in self._groups}

    def take_params(self) -> Params:
        """Hand the weights to the caller. The runner has none afterwards."""
        params, self.params, self._leaves = self.params, Params({}, (), {}), {}
        return params

    @property
    def _parts(self) -> list["Pool | ModelRunner"]:
        return [*self._pools, *([] if self.drafter is None else [self.drafter.runner])]

    def leave_device(self) -> None:
        """Free the pages and states on the device when every copy has arrived, until `come_back`. The copies on the host
        stay."""
        for part in self._parts:
            part.leave_device()

    def come_back(self) -> None:
        """Allocate the pages and states that `leave_device` has freed."""
        for part in self._parts:
            part.come_back()

    def reset(self) -> None:
        """Allocate the pages where they are missing, and forget all of them. Without `warm_up`, a step waits for the
        compilation of executables that it is the first to need."""
        for part in self._parts:
            part.reset()
        self._sampler.reset()

    def close(self) -> None:
        """Free the weights, the pages and the states."""
        self.take_params()
        self._assistant = None
        self.executables.close()
        for part in self._parts:
            part.close()
        self._sampler.close()

    def warm_up(
        self, progress: Progress = silent, most_at_once: int | None = None, only: Iterable[Hashable] | None = None
    ) -> None:
        """Compile executables as `Executables.compile` does, then allocate the pages."""
        # first, since a GPU's compiler needs the memory of the pages to time kernels
        self.executables.compile(progress, most_at_once, only)
        self.reset()

    def first_executables(self, *, measured: bool, tuned: bool = False, kind: Kind) -> list[Hashable]:
        """Keys of the executables on which every plan can run, so that no request waits for a compilation. Some plans run in a
        larger bucket or with more rows than they need.

        Args:
            measured: whether a profile is measured first, whose steps need the executables of every bucket.
            tuned: whether the compiler times products; it does so before the pages take the memory, so all executables with
                products are included.
            kind: of the draws of requests that choose nothing.
        """
        shape, run = self._shape, self.executables
        sizes, most = shape.buckets, shape.sample_rows[-1]
        decodes = next((size for size in sizes if size >= shape.max_num_seqs), sizes[-1])
        # a lone decode row, a short prompt, one decode row for each sequence, and the largest step
        short = {sizes[0], next((size for size in sizes if size >= FIRST_PROMPT), sizes[-1]), decodes, sizes[-1]}
        counts = {min(sizes[0], most), min(decodes, most), most}

        def is_first(key: Hashable) -> bool:
            match key:
                case ("head", int(size), int(count)):
                    full = next(number for number in shape.sample_rows if number >= min(size, shape.max_num_seqs))
                    own = size in short and count == max(number for number in counts if number <= size)
                    return tuned or own or (measured and count in (full, min(counts)))
                case ("sample", count, name):
                    return (
                        (count in counts and name == kind)
                        or (measured and name == "greedy")
                        or (count, name) == (most, KINDS[-1])
                    )
                case (("embed" | "layers" | "decode embed" | "decode layers"), size, *_):
                    return tuned or measured or size in short
                case (("draft layer" | "draft rows"), (size, _), _):
                    return tuned or measured or size in short
                case ("shape", count):
                    return measured or count in counts
                case ("remember", count):
                    return count in counts
                case ("logprobs", count):
                    return count == most
                case ("windows", (_, size, *_)) | (("gather" | "scatter" | "select"), size, *_):
                    return measured or size <= shape.staging_pages
                case ("draft model", *_):
                    return False
                case _:
                    return True

        keys = [key for key in run.pending if is_first(key)]
        if self.drafter is not None:
            keys += self.drafter.runner.first_executables(measured=measured, tuned=tuned, kind=KINDS[1])
        return [*map(run.whole, keys)]

    def _forward(
        self,
        plan: StepPlan,
        last_tokens: Int[Array, "slots"],
        samples: Samples,
        commons: list[np.ndarray],
        moving: list[Pool],
    ) -> tuple[Hidden, tuple[Array, ...], Array]:
        shape, embed, groups = self._calls[samples.step]
        tables = self._state_slots, self._window_tables
        packed = pack(
            plan.chunks, self._tables, self._shape.page_size, shape, *tables, plan.draft and plan.draft.following
        )
        uploads: list[Any] = [np.concatenate((packed, commons[0])), *commons[1:]]
        if len(uploads) > 1 or not self._is_alone:
            uploads = place(uploads, self._home)
        upload, *further = uploads
        # no other executable waits for the host
        x, batch, common = self.executables[embed](self.params.embed, last_tokens, upload)
        for kv in moving:
            kv.commons = (common, *further)
            kv.fetch()
        for kv in moving:
            kv.offload()
        experts, layers = list[Array](), self._layers()
        for key, group, places in groups:
            kept = tuple([layers[index] for index in places])
            x, kept, *noted = self.executables[key](self._leaves[group], x, kept, batch)
            layers.update(zip(places, kept, strict=True))
            for array in noted:
                array.copy_to_host_async()
                experts.append(array)
        for kv in self._pools:
            kv.layers = tuple([layers[place] for place in kv.places])
        for kv in moving:
            kv.scatter()
        return self._sampler.head(x, plan.chunks, samples, common, self.params.head), tuple(experts), batch


@final
class ModelDrafter:
    """Makes the drafts that plans await, with a smaller model.

    It computes every plan too, on pages of its own with the numbers of the served model's. So its KV of a token is wherever the
    served model's is: on the device, on the host, or nowhere. It drafts as it would generate, with the temperature and the
    random numbers of the request's own draws: where the two models agree about the likeliest tokens they also draw the same one
    (the Gumbel-max coupling).

    Args:
        shape: its sizes; pages, sequence slots and buckets as the served model's.
        vocab_size: tokens that the draft model knows, from 0 on.
    """

    def __init__(self, runner: ModelRunner, shape: RunnerShape, vocab_size: int) -> None:
        self.runner, self._buckets = runner, shape.buckets
        self._unknown = vocab_size if vocab_size < shape.drafts_for else None  # the first token that it does not know

    def fill(self, plan: StepPlan, last_tokens: Int[Array, "slots"]) -> tuple[StepPlan, tuple[tuple[int, ...], ...]]:
        """Execute a plan on the draft model, transfers and chunks, and make the drafts that it awaits.

        One step of the draft model has the plan's chunks, without the drafts that they await. Each step after it has a token
        drafted by the one before, the last one too, whose KV the next plan may need. Waits for the drafts, if there are any to
        make.

        Args:
            last_tokens: of the served model, see `ModelRunner.forward`.

        Returns:
            The plan with its drafts, and the drafts of every chunk that awaited them.
        """
        chunks = sorted(map(self._first, plan.chunks), key=lambda chunk: len(chunk.tokens) > 1)
        first = replace(plan, bucket=self._bucket(chunks), chunks=tuple(chunks))
        tickets = [self.runner.sample(self.runner.forward(first, last_tokens), {})]
        awaiting = [chunk for chunk in plan.chunks if chunk.awaits_drafts]
        if not awaiting:
            return plan, ()
        for nth in range(1, 1 + max(chunk.num_drafts for chunk in awaiting)):
            rows = tuple(  # whose tokens are the drafts at this place
                Chunk(
                    chunk.slot,
                    chunk.start + len(chunk.before_drafts) - 1 + nth,
                    (FROM_DEVICE,),
                    (),
                    _draw(chunk, nth),
                )
                for chunk in awaiting
                if chunk.num_drafts >= nth
            )
            tickets.append(self.runner.submit(StepPlan(plan.number, self._bucket(rows), rows)))
        drawn = [iter(self.runner.collect(ticket).tokens) for ticket in tickets]
        drafts = tuple(
            tuple(max(0, next(tokens)) for tokens in drawn[: chunk.num_drafts])  # 0 where none could be drawn
            for chunk in awaiting
        )
        iterator = iter(drafts)
        filled = [
            chunk._replace(tokens=(*chunk.before_drafts, *next(iterator))) if chunk.awaits_drafts else chunk
            for chunk in plan.chunks
        ]
        return replace(plan, chunks=tuple(filled)), drafts

    def _first(self, chunk: Chunk) -> Chunk:
        """The part of a chunk that the first step has."""
        tokens = chunk.before_drafts if chunk.awaits_drafts else chunk.tokens
        if self._unknown is not None and max(tokens) >= self._unknown:
            tokens = tuple(min(token, self._unknown - 1) for token in tokens)
        return chunk._replace(tokens=tokens, sample=_draw(chunk, 0), score=None, num_drafts=0)

    def _bucket(self, chunks: Sequence[Chunk]) -> int:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        return next(size for size in self._buckets if size >= num_tokens) if num_tokens else 0


def _draw(chunk: Chunk, nth: int) -> Sample | None:
    """How the draft after so many is drawn; None behind the last, and where none is awaited."""
    if chunk.sample is None or not chunk.awaits_drafts or nth == chunk.num_drafts:
        return None
    return Sample(chunk.sample.temperature, chunk.sample.random_key)
