"""Executes plans: page transfers, the forward pass in groups of layers, sampling. Knows no requests and decides nothing.

Every executable has a static shape and is compiled by `warm_up`: per token bucket one embedding and one group of
`layers_per_step` layers (and one remainder group), both once more for steps of decode rows only where attention has other code
for these, per number of sampled rows one head and the samplers, and the transfers.
A plan is dispatched in two phases: `forward`, then `sample` with the masks of its constrained rows, which the engine computes
while the device runs the forward pass. Nothing waits for the device but `collect`.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jinfercept.models.protocol import Params, ServedModel, Weights
from jinfercept.pallas.attention import Heads, has_decode_variant, paged_attention, prepare
from jinfercept.pallas.layout import Batch, KVPages, kv_shape, write_kv
from jinfercept.runner.executables import Executables, Progress, silent
from jinfercept.runner.packing import PackedShape, enter, pack, unpack
from jinfercept.runner.page_arrays import KVArrays
from jinfercept.runner.sampler import Drawn, Hidden, Sampler, add_sampler, slots_bytes
from jinfercept.sched.plan import Masks, StepPlan, StepResult


class ForwardTicket(NamedTuple):
    """A plan whose transfers and forward pass were dispatched.

    Attributes:
        hidden: the arrays that sampling reads; None if the plan computes nothing.
        submitted_s: when `forward` was called, in monotonic seconds.
    """

    hidden: Hidden | None
    submitted_s: float


class StepTicket(NamedTuple):
    """A plan that was dispatched in full.

    Attributes:
        drawn: its tokens and reports, on the device.
        submitted_s: when `forward` was called, in monotonic seconds.
    """

    drawn: Drawn
    submitted_s: float


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """The static sizes of a runner.

    Attributes:
        num_pages: pages of the device pool.
        page_size: tokens per page.
        max_num_seqs: sequence slots.
        max_model_len: tokens per sequence.
        buckets: query tokens of the executables, ascending.
        layers_per_step: layers per executable.
        transfer_parts: parts in which a page crosses the host link, each during the compute of its own layers; 1: whole
            pages, during all of a step's compute.
        staging_pages: most pages of one host array, a power of two; 1: every page is its own.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    buckets: tuple[int, ...]
    layers_per_step: int
    transfer_parts: int = 1
    staging_pages: int = 1

    def bucket(self, num_tokens: int) -> PackedShape:
        """The packed sizes of a bucket."""
        pages_per_row = -(-self.max_model_len // self.page_size)
        return PackedShape(num_tokens, min(num_tokens, self.max_num_seqs), pages_per_row)

    def groups(self, num_layers: int) -> list[tuple[int, int]]:
        """First and end layer of every group, the layers of one executable."""
        step = self.layers_per_step
        return [(first, min(first + step, num_layers)) for first in range(0, num_layers, step)]

    def parts(self, num_layers: int) -> list[list[tuple[int, int]]]:
        """The groups whose layers cross the link together, part by part."""
        groups = self.groups(num_layers)
        count = min(self.transfer_parts, len(groups))
        borders = [len(groups) * index // count for index in range(count + 1)]
        return [groups[first:end] for first, end in pairwise(borders)]

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """The buckets in which a step may have decode rows only, ascending."""
        smaller = (0, *self.buckets)
        return tuple(size for size, before in zip(self.buckets, smaller, strict=False) if before < self.max_num_seqs)

    @property
    def sample_rows(self) -> tuple[int, ...]:
        """Numbers of sampled rows that have executables, ascending."""
        return tuple(sorted({self.bucket(size).num_rows for size in self.buckets}))


@final
class ModelRunner:
    """One model on one device.

    Args:
        model, params: the model and its weights; every layer has the same shapes.
        shape: the static sizes.
        attention: implementation of attention, see `pallas.attention`.
    """

    def __init__(self, model: ServedModel, params: Params, shape: RunnerShape, *, attention: str = "auto") -> None:
        config = model.config
        leaf = jax.tree.leaves(params.embed)[0]
        self._home = jax.sharding.SingleDeviceSharding(next(iter(leaf.devices())), memory_kind="device")
        self._model, self._shape = model, shape
        self.params = jax.device_put(params, self._home)  # committed, as the executables expect
        self.kv = KVArrays(
            shape.num_pages,
            shape.page_size,
            parts=[(groups[0][0], groups[-1][1]) for groups in shape.parts(config.num_layers)],
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=leaf.dtype,
            home=self._home,
            staging_pages=shape.staging_pages,
        )
        self._parts = shape.parts(config.num_layers)
        self._tables = np.zeros((shape.max_num_seqs, shape.bucket(1).pages_per_row), np.int32)
        self._run = Executables()
        self._decode_buckets = decode_buckets(model, shape, attention, leaf.dtype)
        self._sampler = Sampler(self._run, shape.sample_rows, shape.max_num_seqs, config.vocab_size, self._home)
        add_steps(self._run, model, shape, attention, self.params, self.kv.layers)
        self.kv.add_executables(self._run)

    def forward(self, plan: StepPlan) -> ForwardTicket:
        """Dispatch a plan's transfers, layers and head, in the order of `StepPlan`.

        A plan without chunks waits for its transfers: there is no compute to hide them behind.
        """
        submitted_s = time.monotonic()
        assert plan.scatter == plan.fetch
        self.kv.begin(plan.fetch, plan.drop, plan.offload)
        if plan.chunks:
            enter(plan.chunks, self._tables)
            bucket = self._shape.bucket(plan.bucket)
            decode_only = plan.bucket in self._decode_buckets and all(len(chunk.tokens) == 1 for chunk in plan.chunks)
            x = self._forward(plan.bucket, decode_only, pack(plan.chunks, self._tables, self._shape.page_size, bucket))
            return ForwardTicket(self._sampler.head(x, plan.chunks, self.params.head), submitted_s)
        for part in range(len(self._parts)):
            self.kv.start(part)
            self.kv.scatter(part)
        self.kv.wait()
        return ForwardTicket(None, submitted_s)

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
        self.params = jax.device_put(params, self._home)
        self.reset()

    def reset(self) -> None:
        """Forget all KV."""
        self.kv.reset()
        self._sampler.reset()

    def close(self) -> None:
        """Free the weights and the pages."""
        self.params = Params({}, (), {})
        self.kv.close()
        self._sampler.close()

    def warm_up(self, progress: Progress = silent) -> None:
        """Compile every executable."""
        self._run.compile(progress)

    @property
    def layers_compile_s(self) -> list[float]:
        """Seconds that each executable of layers took to compile."""
        return [
            seconds
            for key, seconds in self._run.compile_s.items()
            if isinstance(key, tuple) and key[0] in ("layers", "decode layers")
        ]

    def _forward(self, size: int, decode_only: bool, packed: np.ndarray) -> Array:
        embed, layers_of = _names(decode_only)
        kv = self.kv
        kv.start(0)
        x, batch = self._run[embed, size](self.params.embed, self._sampler.last_tokens, packed)
        for part, groups in enumerate(self._parts):
            if part:
                kv.start(part)
            layers = list(kv.layers)
            for first, end in groups:
                step = self._run[layers_of, size, end - first]
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
    leaf = jax.tree.leaves(params.embed)[0]

    def struct(dims: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=leaf.sharding)

    last_tokens, embedded_by_size = struct((shape.max_num_seqs + 1,), jnp.int32), {}
    decodes = decode_buckets(model, shape, attention, leaf.dtype)
    for size, decode_only in [*((size, False) for size in shape.buckets), *((size, True) for size in decodes)]:
        bucket, (embed_name, layers_name) = shape.bucket(size), _names(decode_only)
        packed = pack((), np.zeros((0, bucket.pages_per_row), np.int32), shape.page_size, bucket)
        embed = partial(_embed, model, bucket, attention, decode_only)
        run.add((embed_name, size), embed, params.embed, last_tokens, packed)
        embedded = jax.eval_shape(embed, params.embed, last_tokens, packed)
        x, batch = jax.tree.map(lambda made: struct(made.shape, made.dtype), embedded)
        embedded_by_size[size] = x
        step = partial(_layers, model, attention, decode_only)
        for first, end in {end - first: (first, end) for first, end in shape.groups(len(layers))}.values():
            arguments = (params.layers[first:end], x, layers[first:end], batch)
            run.add((layers_name, size, end - first), step, *arguments, donate=(1, 2))
    add_sampler(run, model, params.head, embedded_by_size, shape.sample_rows, shape.max_num_seqs)


def decode_buckets(
    model: ServedModel, shape: RunnerShape, attention: str, dtype: jax.typing.DTypeLike
) -> frozenset[int]:
    """The buckets that have executables of their own for decode rows only: none if attention has no other code for them."""
    has_variant = has_decode_variant(attention, dtype, model.config.head_dim)
    return frozenset(shape.decode_buckets if has_variant else ())


def _names(decode_only: bool) -> tuple[str, str]:
    """The first parts of the keys of embeddings and of groups of layers."""
    return ("decode embed", "decode layers") if decode_only else ("embed", "layers")


def step_bytes(model: ServedModel, params: Params, shape: RunnerShape, attention: str) -> int:
    """Device memory, in bytes, that a step of the largest bucket takes beside weights and pages, the slots' state included.

    Compiles that step for a pool of one page: pages are written in place, so that their number makes no difference.
    """
    config, leaf = model.config, jax.tree.leaves(params.embed)[0]
    home = jax.sharding.SingleDeviceSharding(next(iter(leaf.devices())), memory_kind="device")

    def struct(dims: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=home)

    run, largest = Executables(), replace(shape, num_pages=1, buckets=shape.buckets[-1:])
    weights = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), params)
    pages = struct(kv_shape(2, shape.page_size, config.num_kv_heads, config.head_dim), leaf.dtype)
    add_steps(run, model, largest, attention, weights, (pages,) * config.num_layers)  # pyright: ignore[reportArgumentType]
    run.compile()
    return run.extra_bytes + slots_bytes(shape.max_num_seqs, config.vocab_size)


def _embed(
    model: ServedModel,
    shape: PackedShape,
    attention: str,
    decode_only: bool,
    params: Weights,
    last_tokens: Int[Array, "slots"],
    packed: Int[Array, "packed"],
) -> tuple[Float[Array, "T E"], Batch]:
    batch, config = unpack(packed, last_tokens, shape), model.config
    with jax.named_scope("embed"):
        x = model.embed(params, batch.tokens)
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, x.dtype.itemsize)
    with jax.named_scope("work"):
        return x, prepare(batch, heads, x.dtype, implementation=attention, decode_only=decode_only)


def _layers(
    model: ServedModel,
    attention: str,
    decode_only: bool,
    params: tuple[Weights, ...],
    x: Float[Array, "T E"],
    layers: tuple[KVPages, ...],
    batch: Batch,
) -> tuple[Float[Array, "T E"], tuple[KVPages, ...]]:
    """A group of consecutive layers: each writes all of the step's keys and values before its attention.

    A profile shows the scopes `layer0`, `layer1`, … by place in the group, not in the model: one executable serves all groups,
    whose calls follow each other in the order of the layers.
    """

    def attend(
        q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], pages: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        pages = write_kv(pages, k, v, batch.write_index)
        return paged_attention(q, pages, batch, implementation=attention, decode_only=decode_only), pages

    written = []
    for index, (weights, pages) in enumerate(zip(params, layers, strict=True)):
        with jax.named_scope(f"layer{index}"):
            x, pages = model.layer(weights, x, batch.positions, pages, attend)
        written.append(pages)
    return x, tuple(written)
