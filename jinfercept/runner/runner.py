"""Executes plans: page transfers, the forward pass in groups of layers, sampling. Knows no requests and decides nothing.

Every executable has a static shape and is compiled by `warm_up`, or by the first step that needs it: per token bucket one
embedding and one group of `layers_per_step` layers (and one remainder group), both once more for steps of decode rows only
where attention has other code for these, per number of sampled rows one head and the samplers, and the transfers.
A plan is dispatched in two phases: `forward`, then `sample` with the masks of its constrained rows, which the engine computes
while the device runs the forward pass. Nothing waits for the device but `collect`.
"""

import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jinfercept.models.blocks import Attend
from jinfercept.models.mesh import EVERYWHERE, Placed, beside, mesh_of, over_devices
from jinfercept.models.protocol import Params, ServedModel, Weights
from jinfercept.models.quantized import weights_of
from jinfercept.pallas.attention import cut_for, joined_attention, paged_attention
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.kv_rows import is_quantised, stored_dtype
from jinfercept.pallas.layout import Batch, KVPages, kv_shape, write_kv
from jinfercept.pallas.rotation import Rotation
from jinfercept.runner.executables import Executables, Progress, silent
from jinfercept.runner.packing import PackedShape, enter, in_place, pack, unpack
from jinfercept.runner.page_arrays import PAGES_SPEC, KVArrays
from jinfercept.runner.sampler import Drawn, Hidden, Sampler, add_sampler, slots_bytes
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import Masks, StepPlan, StepResult


class ForwardTicket(NamedTuple):
    """A plan whose transfers and forward pass were dispatched.

    Attributes:
        hidden: the arrays that sampling reads; None if the plan computes nothing.
        submitted_s: when `forward` was called, in monotonic seconds.
        drafts: of every chunk that awaited them.
    """

    hidden: Hidden | None
    submitted_s: float
    drafts: tuple[tuple[int, ...], ...] = ()


class StepTicket(NamedTuple):
    """A plan that was dispatched in full.

    Attributes:
        drawn: its tokens and reports, on the device.
        submitted_s: when `forward` was called, in monotonic seconds.
    """

    drawn: Drawn
    submitted_s: float


class Drafter(Protocol):
    """What makes the drafts of plans, see `drafting.ModelDrafter`."""

    @property
    def runner(self) -> "ModelRunner":
        """Of the draft model."""
        ...

    def fill(self, plan: StepPlan, last_tokens: Int[Array, "slots"]) -> tuple[StepPlan, tuple[tuple[int, ...], ...]]:
        """The plan with the drafts that it awaits, and these by chunk; all else of it is executed on the draft model too."""
        ...


@final
class ModelRunner:
    """One model on the devices where its weights lie. `warm_up` or `allocate` comes before its first plan.

    Args:
        model, params: the model and its weights; every layer has the same shapes. Where they lie on several devices, these cut
            the pages by KV head.
        shape: the static sizes.
        attention: implementation of attention, see `pallas.attention`.
        executables: to which its own are added.

    Attributes:
        device: the first one of this process.
        executables: of the steps and the transfers.
        drafter: what makes the drafts that plans await, if there is a draft model.
        drafting: whether the draft model computes every plan too. A change forgets no KV: `reset` has to follow.
    """

    def __init__(
        self,
        model: ServedModel,
        params: Params,
        shape: RunnerShape,
        *,
        attention: str = "auto",
        executables: Executables | None = None,
    ) -> None:
        config = model.config
        self._model, self._shape = model, shape
        self._homes = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("device"), params)
        self.params = jax.device_put(params, self._homes)  # committed, as the executables expect
        leaf = weights_of(self.params.embed)[0]
        self.device = mesh_of(leaf).local_devices[0]
        self.kv = KVArrays(
            shape.num_pages,
            shape.page_size,
            parts=[(groups[0][0], groups[-1][1]) for groups in shape.parts(config.num_layers)],
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=stored_dtype(shape.kv_cache_dtype, leaf.dtype),
            home=beside(leaf, PAGES_SPEC),
            staging_pages=shape.staging_pages,
            pinned=shape.pinned_memory,
        )
        self._parts = shape.parts(config.num_layers)
        self._tables = np.zeros((shape.max_num_seqs, shape.bucket(1).pages_per_row), np.int32)
        self.executables = Executables() if executables is None else executables
        self.drafter: Drafter | None = None
        self.drafting = True
        self._buckets = step_shapes(model, shape, attention, leaf)
        self._sampler = Sampler(
            self.executables,
            shape.sample_rows,
            shape.max_num_seqs,
            shape.drafts_for or config.vocab_size,
            beside(leaf),
        )
        add_steps(self.executables, model, shape, attention, self.params, self.kv.shapes)
        self.kv.add_executables(self.executables)

    def forward(self, plan: StepPlan, last_tokens: Int[Array, "slots"] | None = None) -> ForwardTicket:
        """Dispatch a plan's transfers, layers and head, in the order of `StepPlan`.

        A plan without chunks waits for its transfers: there is no compute to hide them behind. One that awaits drafts waits for
        the draft model.

        Args:
            last_tokens: the token of every slot that a chunk's `FROM_DEVICE` stands for; None: the one drawn last.
        """
        submitted_s, drafts = time.monotonic(), ()
        assert plan.scatter == plan.fetch
        if last_tokens is None:
            last_tokens = self._sampler.last_tokens
        if self.drafter is not None and self.drafting:
            plan, drafts = self.drafter.fill(plan, last_tokens)
        self.kv.begin(plan.fetch, plan.drop, plan.offload)
        if plan.chunks:
            enter(plan.chunks, self._tables)
            x = self._forward(plan, last_tokens)
            return ForwardTicket(self._sampler.head(x, plan.chunks, self.params.head), submitted_s, drafts)
        for part in range(len(self._parts)):
            self.kv.start(part)
            self.kv.scatter(part)
        self.kv.wait()
        return ForwardTicket(None, submitted_s)

    def drafts(self, forward: ForwardTicket) -> tuple[tuple[int, ...], ...]:
        """The drafts of every chunk that awaited them, in the plan's order."""
        return forward.drafts

    def sample(self, forward: ForwardTicket, masks: Masks) -> StepTicket:
        """Dispatch the sampling of the plan whose forward pass was dispatched last.

        Args:
            masks: of the plan's constrained rows.
        """
        hidden = forward.hidden
        drawn = Drawn() if hidden is None else self._sampler.draw(hidden, self.params.head, masks)
        return StepTicket(drawn, forward.submitted_s)

    def submit(self, plan: StepPlan) -> StepTicket:
        """Dispatch both phases of a plan that has no constrained rows."""
        return self.sample(self.forward(plan), {})

    def collect(self, ticket: StepTicket) -> StepResult:
        """Wait for a plan's tokens."""
        tokens, logprobs, scores = self._sampler.read(ticket.drawn)
        return StepResult(tokens, time.monotonic() - ticket.submitted_s, logprobs, scores)

    def update(self, params: Params) -> None:
        """Replace the weights by others of the same structure, shapes and dtypes, and forget all KV."""
        self.params = jax.device_put(params, self._homes)
        self.reset()

    def reset(self) -> None:
        """Forget all KV."""
        self.kv.reset()
        self._sampler.reset()
        if self.drafter is not None:
            self.drafter.runner.reset()

    def close(self) -> None:
        """Free the weights and the pages."""
        self.params = Params({}, (), {})
        self.executables.close()
        self.kv.close()
        self._sampler.close()
        if self.drafter is not None:
            self.drafter.runner.close()

    def warm_up(self, progress: Progress = silent, most_at_once: int | None = None) -> None:
        """Compile every executable, then allocate the pages, whose memory a GPU's compiler needs to time kernels.

        Args:
            progress: called with what is done.
            most_at_once: executables that are compiled at the same time; None: one for each processor.
        """
        self.executables.compile(progress, most_at_once)
        self.allocate()

    def allocate(self) -> None:
        """Allocate the pages. A step waits for the compilation of the executables that it is the first to need."""
        self.kv.reset()
        if self.drafter is not None:
            self.drafter.runner.allocate()

    @property
    def layers_compile_s(self) -> list[float]:
        """Seconds that each executable of layers took to compile."""
        return [
            seconds
            for key, seconds in self.executables.compile_s.items()
            if isinstance(key, tuple) and key[0] in ("layers", "decode layers")
        ]

    def _forward(self, plan: StepPlan, last_tokens: Int[Array, "slots"]) -> Array:
        size, kv = plan.bucket, self.kv
        decode_only = (size, True) in self._buckets and all(len(chunk.tokens) == 1 for chunk in plan.chunks)
        packed = pack(plan.chunks, self._tables, self._shape.page_size, self._buckets[size, decode_only])
        embed, layers_of = _names(decode_only)
        kv.start(0)
        x, batch = self.executables[embed, size](self.params.embed, last_tokens, packed)
        for part, groups in enumerate(self._parts):
            if part:
                kv.start(part)
            layers = list(kv.layers)
            for first, end in groups:
                step = self.executables[layers_of, size, end - first]
                x, layers[first:end] = step(self.params.layers[first:end], x, tuple(layers[first:end]), batch)
            kv.layers = tuple(layers)
            kv.scatter(part)
        return x


def add_steps(
    run: Executables,
    model: ServedModel,
    shape: RunnerShape,
    attention: str,
    params: Params,
    layers: tuple[KVPages, ...],
) -> None:
    """Add every executable that a plan's chunks can need, for arrays or for their shapes.

    Args:
        run: to which they are added.
        attention: see `pallas.attention`; `auto` only for the default backend.
        params, layers: the weights and the KV: arrays, or shapes with shardings.
    """
    leaf = weights_of(params.embed)[0]

    def struct(dims: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=beside(leaf))

    last_tokens, embedded_by_size = struct((shape.max_num_seqs + 1,), jnp.int32), {}
    for (size, decode_only), bucket in step_shapes(model, shape, attention, leaf).items():
        embed_name, layers_name = _names(decode_only)
        packed = pack((), np.zeros((0, bucket.pages_per_row), np.int32), shape.page_size, bucket)
        embed = over_devices(partial(_embed, model, bucket), (params.embed, last_tokens, packed))
        passed = () if bucket.cut is None else (2,)  # the packed vector goes on to the layers
        run.add((embed_name, size), embed, params.embed, last_tokens, packed, donate=passed)
        embedded = jax.eval_shape(embed, params.embed, last_tokens, packed)
        x, batch = jax.tree.map(lambda made: struct(made.shape, made.dtype), embedded)
        embedded_by_size[size] = x
        step = partial(_layers, model, attention, bucket)
        for first, end in {end - first: (first, end) for first, end in shape.groups(len(layers))}.values():
            arguments = (params.layers[first:end], x, layers[first:end], batch)
            whole = over_devices(step, arguments, out=(EVERYWHERE, PAGES_SPEC))
            run.add((layers_name, size, end - first), whole, *arguments, donate=(1, 2))
    add_sampler(
        run, model, params.head, embedded_by_size, shape.sample_rows, shape.max_num_seqs, drafts_for=shape.drafts_for
    )


def step_shapes(
    model: ServedModel, shape: RunnerShape, attention: str, like: Placed
) -> dict[tuple[int, bool], PackedShape]:
    """The packed sizes of every step's executables: by bucket, and by whether they are for decode rows only.

    There are such executables only where attention has other code for them.

    Args:
        like: an array with the dtype and on the devices of the steps, each of which has its share of the heads.
    """
    config, num_devices = model.config, mesh_of(like).size
    num_heads, num_kv_heads = config.num_heads // num_devices, config.num_kv_heads // num_devices
    heads = Heads(num_heads, num_kv_heads, config.head_dim, like.dtype.itemsize)
    stored = stored_dtype(shape.kv_cache_dtype, like.dtype)
    cut = cut_for(heads, like.dtype, stored, implementation=attention)
    joined = shape.joined_decode and not is_quantised(stored)  # they attend to the row's own key before it is rounded
    kinds = [(size, False) for size in shape.buckets]
    kinds += [] if cut is None else [(size, True) for size in shape.decode_buckets]
    return {
        (size, alone): shape.bucket(size)._replace(cut=cut, decode_only=alone, joined=alone and joined)
        for size, alone in kinds
    }


def _names(decode_only: bool) -> tuple[str, str]:
    """The first parts of the keys of embeddings and of groups of layers."""
    return ("decode embed", "decode layers") if decode_only else ("embed", "layers")


def step_bytes(model: ServedModel, params: Params, shape: RunnerShape, attention: str) -> int:
    """Device memory, in bytes, that a step of the largest bucket takes beside weights and pages, the slots' state included.

    Compiles that step for a pool of one page: pages are written in place, so that their number makes no difference.
    """
    config = model.config

    def struct(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind("device"))

    run, largest = Executables(), replace(shape, num_pages=1, buckets=shape.buckets[-1:])
    weights = jax.tree.map(struct, params)
    leaf = weights_of(weights.embed)[0]
    dtype = stored_dtype(shape.kv_cache_dtype, leaf.dtype)
    dims = kv_shape(2, shape.page_size, config.num_kv_heads, config.head_dim, dtype)
    pages = jax.ShapeDtypeStruct(dims, dtype, sharding=beside(leaf, PAGES_SPEC))
    add_steps(run, model, largest, attention, weights, (pages,) * config.num_layers)  # pyright: ignore[reportArgumentType]
    run.compile()
    return run.extra_bytes + slots_bytes(shape.max_num_seqs, config.vocab_size)


def _embed(
    model: ServedModel,
    shape: PackedShape,
    params: Weights,
    last_tokens: Int[Array, "slots"],
    packed: Int[Array, "packed"],
) -> tuple[Float[Array, "T E"], Batch | Int[Array, "packed"]]:
    """The tokens' vectors, and what the layers read of the batch: the packed vector itself, if their kernels can."""
    batch = unpack(packed, last_tokens, shape)
    with jax.named_scope("embed"):
        x = model.embed(params, batch.tokens)
    return x, batch if shape.cut is None else packed


class _JoinedAttend(NamedTuple):
    """Attention of decode rows that rotates queries and keys itself; a model that rotates them calls `separate`."""

    separate: Attend[KVPages]
    batch: Batch

    def __call__(
        self, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], pages: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        return self.separate(q, k, v, pages)

    def joined(
        self, qkv: Float[Array, "T K G2 D"], rotation: Rotation, pages: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        return joined_attention(qkv, rotation, pages, self.batch)


def _layers(
    model: ServedModel,
    attention: str,
    shape: PackedShape,
    params: tuple[Weights, ...],
    x: Float[Array, "T E"],
    layers: tuple[KVPages, ...],
    batch: Batch | Int[Array, "packed"],
) -> tuple[Float[Array, "T E"], tuple[KVPages, ...]]:
    """A group of consecutive layers: each writes all of the step's keys and values before its attention.

    A profile shows the scopes `layer0`, `layer1`, … by place in the group, not in the model: one executable serves all groups,
    whose calls follow each other in the order of the layers.
    """
    step = batch if isinstance(batch, Batch) else in_place(batch, shape)

    def attend(
        q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], pages: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        pages = write_kv(pages, k, v, step.write_index)
        return paged_attention(q, pages, step, implementation=attention, decode_only=shape.decode_only), pages

    if shape.joined:
        attend = _JoinedAttend(attend, step)
    written = []
    for index, (weights, pages) in enumerate(zip(params, layers, strict=True)):
        with jax.named_scope(f"layer{index}"):
            x, pages = model.layer(weights, x, step.positions, pages, attend)
        written.append(pages)
    return x, tuple(written)
