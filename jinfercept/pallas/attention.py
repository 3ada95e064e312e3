"""Chooses the implementation of paged attention: a new kernel is a file, and an entry in the tables here.

Every implementation takes `(q, pages, batch)`, applies the 1/√D scale itself, gives zeros for padding tokens, and is
tested against `paged_attention_reference`.
"""

from types import ModuleType

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.pallas.cpu_attention import paged_attention_cpu
from jinfercept.pallas.layout import Batch, KVPages
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import HOPPER
from jinfercept.pallas.triton_attention import (
    AMPERE,
    Heads,
    compute_capability,
    is_supported,
    paged_attention_triton,
    schedule_work,
)


def _mosaic() -> ModuleType:
    """The module with the kernel for Hopper, imported on demand: the import takes half a second."""
    from jinfercept.pallas import mosaic_attention

    return mosaic_attention


IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "cpu": paged_attention_cpu,
    "triton": paged_attention_triton,
    "mosaic": lambda *operands, **options: _mosaic().paged_attention_mosaic(*operands, **options),
}
SCHEDULES = {
    "triton": schedule_work,
    "mosaic": lambda *operands, **options: _mosaic().schedule_mosaic(*operands, **options),
}
"""Work schedules of the implementations that have them, made once per step for all layers; these have decode variants too."""


def paged_attention(
    q: Float[Array, "T H D"],
    pages: KVPages,
    batch: Batch,
    *,
    implementation: str = "auto",
    decode_only: bool = False,
) -> Float[Array, "T H D"]:
    """Causal attention of a step's query tokens over the pages of their rows, the step's own tokens already written.

    Args:
        q: queries, unscaled; H is a multiple of the pages' K.
        pages: one layer's pages.
        batch: the ragged rows; see `Batch`.
        implementation: a name in `IMPLEMENTATIONS`, or `auto`: the best one for these shapes on JAX's default backend.
            Code that is compiled for another device has to name one.
        decode_only: every row of the batch is a decode row. Leaves out the kernel for chunks, see `has_decode_variant`.

    Raises:
        ValueError: the implementation is unknown, or does not support these shapes.
    """
    if implementation == "auto":
        implementation = _best(q.dtype, pages.dtype, q.shape[2])
    if implementation not in IMPLEMENTATIONS:
        fix = f"choose auto or one of {', '.join(IMPLEMENTATIONS)}"
        raise ValueError(f"no such attention implementation; got {implementation}; fix: {fix}")
    options = {"decode_only": True} if decode_only and implementation in SCHEDULES else {}
    return IMPLEMENTATIONS[implementation](q, pages, batch, **options)


def prepare(
    batch: Batch, heads: Heads, dtype: DTypeLike, *, implementation: str = "auto", decode_only: bool = False
) -> Batch:
    """The batch with its work schedules, if the implementation has them.

    Args:
        batch: of one step.
        heads: of the model.
        dtype: of queries and pages.
        implementation, decode_only: as for `paged_attention`.
    """
    if implementation == "auto":
        implementation = _best(dtype, dtype, heads.head_dim)
    schedule = SCHEDULES.get(implementation)
    return batch if schedule is None else batch._replace(work=schedule(batch, heads, decode_only=decode_only))


def has_decode_variant(implementation: str, dtype: DTypeLike, head_dim: int) -> bool:
    """Whether `decode_only` makes other code, so that executables of steps without chunks are worth their compilation.

    Args:
        implementation: as for `paged_attention`.
        dtype: of queries and pages.
        head_dim: of the model.
    """
    if implementation == "auto":
        implementation = _best(dtype, dtype, head_dim)
    return implementation in SCHEDULES


def available(q: DTypeLike, pages: DTypeLike, head_dim: int, page_size: int) -> list[str]:
    """The implementations that support these shapes on JAX's default backend, without the reference."""
    best = _best(q, pages, head_dim)
    hopper = jax.default_backend() == "gpu" and compute_capability() == HOPPER
    also = hopper and _mosaic().is_supported(q, pages, head_dim, page_size)
    return [*([] if best == "reference" else [best]), *(["mosaic"] if also else [])]


def _best(q: DTypeLike, pages: DTypeLike, head_dim: int) -> str:
    match jax.default_backend():
        case "cpu":
            return "cpu"
        case "gpu" if is_supported(q, pages, head_dim) and compute_capability() >= AMPERE:
            return "triton"
        case _:
            return "reference"
