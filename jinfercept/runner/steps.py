"""The executables of a step's chunks: per bucket an embedding and groups of layers, then heads and samplers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int16

from jinfercept.models.adapted import for_rows
from jinfercept.models.attention import best, cut_for
from jinfercept.models.mesh import EVERYWHERE, Placed, beside, mesh_of, over_devices, specs_of
from jinfercept.models.model import Model
from jinfercept.models.parallel import num_devices
from jinfercept.models.protocol import (
    MixedModel,
    Params,
    ServedModel,
    Weights,
    kv_places,
    num_draft_layers,
    windowed_config,
    windows_of,
)
from jinfercept.models.quantized import weights_of
from jinfercept.pallas.layouts.kv_rows import is_quantised, stored_dtype
from jinfercept.pallas.layouts.pages import Batch
from jinfercept.pallas.layouts.states import StateRows
from jinfercept.pallas.tiles import Heads
from jinfercept.runner.draft_layer import Assistant, DraftSteps, add_assistant, add_draft_layer
from jinfercept.runner.executables import Executables
from jinfercept.runner.layer_attention import step_attention
from jinfercept.runner.packing import CommonShape, PackedShape, Step, in_place, packed_size, unpack
from jinfercept.runner.page_transfers import transfer_sizes
from jinfercept.runner.pools import pool_shapes
from jinfercept.runner.sampler import add_sampler, slots_bytes
from jinfercept.runner.shape import RunnerShape, pool_windows

STACKED = ("attn_norm", "ffn_norm", "attn_post_norm", "ffn_post_norm")
"""Scales of norms that XLA computes. A kernel that reads a vector, as those of quantised weights do, needs it as an array."""


def add_steps(
    run: Executables,
    model: ServedModel,
    shape: RunnerShape,
    attention: str,
    params: Params,
    assistant: Assistant | None = None,
) -> None:
    """Add every executable that a plan's chunks can need. `params` are arrays, or shapes with shardings.

    An `attention` of `auto` is for the default backend only, see `models.attention`.
    """
    leaf, kinds = weights_of(params.embed)[0], kinds_of(model)
    table = step_table(model, shape, attention, leaf)
    layers = {place: array for pool in pool_shapes(model, shape, leaf) for place, array in pool.items()}

    def struct(dims: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=beside(leaf))

    num_layers = model.config.num_layers
    windows = pool_windows(model, shape) or (0,) * num_layers
    last_tokens, embedded_by_size = struct((shape.max_num_seqs + 1,), jnp.int32), {}
    platform = mesh_of(leaf).devices[0].platform
    common_shape = CommonShape(shape.sample_rows[-1], transfer_sizes(platform, shape.staging_pages)[0])
    batches = dict[Step, Any]()
    for step, (bucket, embed_key, groups) in table.items():
        size = bucket.num_tokens
        upload = struct((packed_size(bucket) + common_shape.size,), jnp.int32)
        embed = over_devices(partial(_embed, model, bucket), (params.embed, last_tokens, upload))
        run.add(embed_key, embed, params.embed, last_tokens, upload, donate=(2,) if bucket.cut else ())
        embedded = jax.eval_shape(embed, params.embed, last_tokens, upload)
        x = embedded_by_size[size] = struct(embedded[0].shape, embedded[0].dtype)
        batch = batches[step] = jax.tree.map(lambda part: struct(part.shape, part.dtype), embedded[1])
        for key, (first, end), own in {group.key: group for group in groups}.values():
            kinds_of_group = kinds[first:end] or (None,) * (end - first)
            leaves, tree = jax.tree.flatten(call_weights(params.layers[first:end]))
            places = tuple(map(own.index, kv_places(model)[first:end]))
            layers_of_group = partial(_layers, model, bucket, kinds_of_group, windows[first:end], places, tree)
            kept = tuple(layers[place] for place in own)
            arguments = (tuple(leaves), x, kept, batch)
            out = (EVERYWHERE, specs_of(kept), *([EVERYWHERE] if shape.routed_experts else []))
            whole = over_devices(layers_of_group, arguments, out=out)
            run.add(key, whole, *arguments, donate=(1, 2))
    if shape.is_assisted or num_draft_layers(model.config):
        packed = {step: calls.shape for step, calls in table.items()}
        steps = DraftSteps(packed, embedded_by_size, common_shape, batches, shape.num_drafts, shape.num_drawn)
        steps.add_rows(run, shape.sample_rows)
        if assistant is not None:
            add_assistant(run, assistant, cast(Model, model), params, steps, layers)
        else:
            add_draft_layer(run, cast(Model, model), params, steps, layers[max(layers)])
    add_sampler(
        run,
        model,
        params.head,
        embedded_by_size,
        common_shape,
        shape.sample_rows,
        shape.max_num_seqs,
        drafts_for=shape.drafts_for,
        num_drawn=shape.num_drawn,
    )


class LayerGroup(NamedTuple):
    """Consecutive layers of one executable."""

    key: Hashable  # of the executable; groups of equal layers share it
    layers: tuple[int, int]  # the first one and the end
    places: tuple[int, ...]  # that they read and write, see `kv_places`, each once


class StepCalls(NamedTuple):
    """A step before its head: the sizes of its upload, the key of its embedding, and its groups of layers."""

    shape: PackedShape
    embed: Hashable
    groups: tuple[LayerGroup, ...]


def step_table(model: ServedModel, shape: RunnerShape, attention: str, like: Placed) -> dict[Step, StepCalls]:
    """The calls of every step of `step_shapes`, smaller ones first; of one bucket, those of decode rows only."""
    shapes, kinds, places = step_shapes(model, shape, attention, like), kinds_of(model), kv_places(model)
    table = dict[Step, StepCalls]()
    for step in sorted(shapes, key=lambda step: (step[0], not step[1])):
        size, alone = step
        embed, name = ("decode embed", "decode layers") if alone else ("embed", "layers")
        groups = (
            LayerGroup(layers_key(name, size, layers, kinds), layers, tuple(dict.fromkeys(places[slice(*layers)])))
            for layers in shape.groups(num_computed(model))
        )
        table[step] = StepCalls(shapes[step], (embed, size), tuple(groups))
    return table


def call_weights(layers: Sequence[Weights]) -> tuple[Weights, tuple[Weights, ...]]:
    """The weights of a group of layers as its call takes them: arrays, or shapes with shardings.

    Those of `STACKED` are one array `[L, E]` for each name. All others stay by layer.
    """
    is_dense = all(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for layer in layers for leaf in layer.values())
    names = [name for name in STACKED if is_dense and all(name in layer for layer in layers)]
    # every array of a call costs the host
    stacks = {name: _stacked([layer[name] for layer in layers]) for name in names}
    return stacks, tuple({name: layer[name] for name in layer if name not in stacks} for layer in layers)


def _stacked(vectors: Sequence[Any]) -> Any:
    first = vectors[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(vectors), *first.shape), first.dtype, sharding=first.sharding)
    return jax.jit(jnp.stack, out_shardings=first.sharding)(vectors)


def step_shapes(model: ServedModel, shape: RunnerShape, attention: str, like: Placed) -> dict[Step, PackedShape]:
    """The packed sizes of every step's executables: by bucket, and by whether they serve steps of decode rows only.

    Executables for decode rows exist only where attention has other code for them. `like` has the dtype and the devices of the
    steps.
    """
    config, stored = model.config, stored_dtype(shape.kv_cache_dtype, like.dtype)
    heads, window_heads = (
        Heads(
            sizes.num_heads // mesh_of(like).size,
            sizes.num_kv_heads // mesh_of(like).size,
            sizes.head_dim,
            like.dtype.itemsize,
            is_quantised(stored),
        )
        for sizes in (config, windowed_config(model))
    )
    if attention == "auto":
        scored = getattr(config, "soft_cap", None) or getattr(config, "sinks", False)
        plain = not scored and not all(window and window < shape.most_tokens for window in windows_of(model) or (None,))
        attention = best(like.dtype, stored, heads, shape.page_size, plain=plain)
    cut = cut_for(heads, attention)
    kinds = [(size, False) for size in shape.buckets]
    kinds += [] if cut is None else [(size, True) for size in shape.decode_buckets]
    own = {"attention": attention, "cut": cut, "window": max(pool_windows(model, shape), default=0)}
    own["has_draft_layer"] = shape.is_assisted or num_draft_layers(config) > 0
    own |= {"window_cut": None if window_heads == heads else cut_for(window_heads, attention)}
    return {
        # joined attention reads a row's own key before it is rounded
        (size, alone): shape.bucket(size)._replace(decode_only=alone, joined=alone and not is_quantised(stored), **own)
        for size, alone in kinds
    }


def kinds_of(model: ServedModel) -> tuple[Hashable, ...]:
    """The kind of every layer; () if all are alike."""
    return model.layer_kinds if isinstance(model, MixedModel) else ()


def num_computed(model: ServedModel) -> int:
    """Layers of the model, without those that draft."""
    return model.config.num_layers - num_draft_layers(model.config)


def layers_key(name: str, num_tokens: int, group: tuple[int, int], kinds: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """The key of the executable of a group of layers. `kinds` are those of all layers, see `kinds_of`."""
    first, end = group
    key = name, num_tokens, end - first
    return (*key, kinds[first:end]) if kinds else key


def step_bytes(
    model: ServedModel, params: Params, shape: RunnerShape, attention: str, assistant: Assistant | None = None
) -> int:
    """Device memory, in bytes, that a step of the largest bucket takes beside weights and pages, the slots' state included."""

    def struct(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind("device"))

    # pages are written in place, so that their number makes no difference
    pools = {"num_pages": 1, "num_window_pages": min(1, shape.num_window_pages)}
    run, largest = Executables(), replace(shape, buckets=shape.buckets[-1:], **pools)
    weights = jax.tree.map(struct, params)
    if assistant is not None:
        assistant = assistant._replace(params=jax.tree.map(struct, assistant.params))
    add_steps(run, model, largest, attention, weights, assistant)
    run.compile()
    return run.extra_bytes + slots_bytes(shape.max_num_seqs, model.config.vocab_size)


@dataclass(frozen=True)
class RowExperts:
    """The experts of consecutive query tokens of a step, on the host: a `sched.plan.TokenExperts`."""

    rows: Int16[np.ndarray, "T L C"]

    def of(self, place: int, count: int) -> Self:
        # a copy, which does not keep the memory of the others
        return type(self)(self.rows[place : place + count].copy())

    def placed(self, pieces: Sequence[tuple[int, Self]], num_tokens: int) -> Int16[np.ndarray, "T L C"]:
        whole = np.full((num_tokens, *self.rows.shape[1:]), -1, np.int16)
        for start, experts in pieces:
            whole[start : start + len(experts.rows)] = experts.rows[: max(0, num_tokens - start)]
        return whole


def _embed(
    model: ServedModel,
    shape: PackedShape,
    params: Weights,
    last_tokens: Int[Array, "slots"],
    upload: Int[Array, "upload"],
) -> tuple[Float[Array, "T E"], Batch | Int[Array, "upload"], Int[Array, "common"]]:
    batch = unpack(upload, last_tokens, shape)
    with jax.named_scope("embed"):
        x = model.embed(params, batch.tokens, batch.positions)
    return x, batch if shape.cut is None else upload, upload[packed_size(shape) :]


class _NotingRows(StateRows):
    noted: list[Int[Array, "T C"]]

    def note_experts(self, experts: Int[Array, "T C"]) -> None:
        self.noted.append(experts)


def _layers(
    model: ServedModel,
    shape: PackedShape,
    kinds: tuple[Hashable, ...],
    windows: tuple[int, ...],
    places: tuple[int, ...],
    tree: Any,
    leaves: tuple[Any, ...],
    x: Float[Array, "T E"],
    layers: tuple[Any, ...],
    batch: Batch | Int[Array, "upload"],
) -> tuple[Float[Array, "T E"], tuple[Any, ...]] | tuple[Float[Array, "T E"], tuple[Any, ...], Int16[Array, "T L C"]]:
    """A group of consecutive layers. Each writes all of the step's keys and values before its attention, or has states.

    Args:
        windows: of the layers with pages in the pool for windows, 0 for the others.
        places: for each layer, which of `layers` it reads; layers may share pages or states.
        tree, leaves: `call_weights` of the layers, flattened: a call costs the host less.
    """
    step = in_place(batch, shape)
    noted, kept = list[Int[Array, "T C"]](), list(layers)
    stacks, own = jax.tree.unflatten(tree, leaves)
    params = tuple(
        {**weights, **{name: vectors[index] for name, vectors in stacks.items()}} for index, weights in enumerate(own)
    )
    if step.adapters is not None:
        params = for_rows(params, step.adapters, shape.num_adapters)
    attend = windowed = step_attention(shape, step, noted, model.config.num_kv_heads // num_devices())
    if shape.window:
        windowed = step_attention(shape, step.of_windows, noted, windowed_config(model).num_kv_heads // num_devices())
    for index, (kind, window, place, weights) in enumerate(zip(kinds, windows, places, params, strict=True)):
        layer = model.layer if kind is None else partial(cast(MixedModel, model).layer, kind=kind)
        seam: Any = windowed if window else attend
        if isinstance(kept[place], tuple):
            slots, sources, num_drafts = step.states
            rows = _NotingRows(slots, sources, num_drafts, step.query_starts, step.context_lens, step.num_decode)
            rows.noted = noted
            seam = rows
        # by place in the group, not in the model: one executable serves all groups, whose calls follow each other in profiles
        with jax.named_scope(f"layer{index}"):
            x, kept[place] = layer(weights, x, step.positions, kept[place], seam)
    if not shape.routed_experts:
        return x, tuple(kept)
    none = jnp.zeros((len(x), 0, shape.routed_experts), jnp.int16)
    return x, tuple(kept), jnp.stack(noted, axis=1).astype(jnp.int16) if noted else none
