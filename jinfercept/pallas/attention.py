"""The one place where an implementation of paged attention is chosen: a new kernel is a file and its entries here.

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
    """The module with the kernel for Hopper, which takes half a second to import and which few ask for."""
    from jinfercept.pallas import mosaic_attention

    return mosaic_attention


IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "cpu": paged_attention_cpu,
    "triton": paged_attention_triton,
    "mosaic": lambda q, pages, batch: _mosaic().paged_attention_mosaic(q, pages, batch),
}
SCHEDULES = {"triton": schedule_work, "mosaic": lambda batch, heads: _mosaic().deal_out_mosaic(batch, heads)}
"""What deals out a step's work once for all layers, where an implementation has such a thing."""


def paged_attention(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, *, implementation: str = "auto"
) -> Float[Array, "T H D"]:
    """Causal attention of a step's query tokens over the pages of their rows, the step's own tokens already written.

    Args:
        q: queries, unscaled; H is a multiple of the pages' K.
        pages: one layer's pages.
        batch: the ragged rows; see `Batch`.
        implementation: a name in `IMPLEMENTATIONS`, or `auto`: the best one for these shapes on JAX's default backend. Who
            compiles for a device that is not here names it.

    Raises:
        ValueError: the implementation is unknown, or has nothing for these shapes.
    """
    if implementation == "auto":
        implementation = _best(q.dtype, pages.dtype, q.shape[2])
    if implementation not in IMPLEMENTATIONS:
        fix = f"choose auto or one of {', '.join(IMPLEMENTATIONS)}"
        raise ValueError(f"no such attention implementation; got {implementation}; fix: {fix}")
    return IMPLEMENTATIONS[implementation](q, pages, batch)


def prepare(batch: Batch, heads: Heads, dtype: DTypeLike, *, implementation: str = "auto") -> Batch:
    """The batch with what its attention can share between layers, if that is worth it.

    Args:
        batch: of one step.
        heads: of the model.
        dtype: of queries and pages.
        implementation: as `paged_attention` will be told.
    """
    if implementation == "auto":
        implementation = _best(dtype, dtype, heads.head_dim)
    dealer = SCHEDULES.get(implementation)
    return batch if dealer is None else batch._replace(work=dealer(batch, heads))


def available(q: DTypeLike, pages: DTypeLike, head_dim: int, page_size: int) -> list[str]:
    """The implementations, but the reference, that have something for these shapes on JAX's default backend."""
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
