"""Chooses the implementation of paged attention. A new kernel is a file and an entry in the table here, or in that of
`gpu_kernels` if it is one for NVIDIA GPUs."""

from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.cpu_kernels.attention import paged_attention_cpu
from jinfercept.cpu_kernels.ordered_attention import ordered_attention
from jinfercept.pallas import gpu_kernels, tpu_kernels
from jinfercept.pallas.gpu_kernels import CUTS
from jinfercept.pallas.layouts.pages import Batch, KVPages
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import Heads
from jinfercept.pallas.tpu_kernels import paged_attention_tpu
from jinfercept.pallas.work_schedule import WorkCut

# Each takes `(q, pages, batch, scoring)`, applies the 1/√D scale itself, gives zeros for padding tokens, and is tested
# against `paged_attention_reference`.
IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "cpu": paged_attention_cpu,
    "ordered": ordered_attention,
    "tpu": paged_attention_tpu,
    **gpu_kernels.ATTENTION,
}


def paged_attention(
    q: Float[Array, "T H D"],
    pages: KVPages,
    batch: Batch,
    *,
    scoring: Scoring = PLAIN,
    implementation: str,
    decode_only: bool = False,
) -> Float[Array, "T H D"]:
    """Causal attention of a step's queries over the pages of their rows, into which the step's own tokens are already written.

    Args:
        q: unscaled; H is a multiple of the pages' K.
        pages: of one layer.
        batch: the ragged rows, with their work if the implementation has a cut.
        implementation: a name in `IMPLEMENTATIONS`.
        decode_only: every row is a decode row. Leaves out the kernel for chunks.

    Raises:
        ValueError: the implementation does not support these shapes.
    """
    options: dict[str, Any] = {"decode_only": True} if decode_only and implementation in CUTS else {}
    if not scoring.is_plain:
        options["scoring"] = scoring
    return IMPLEMENTATIONS[implementation](q, pages, batch, **options)


def cut_for(heads: Heads, implementation: str) -> WorkCut | None:
    """How an implementation, not `auto`, cuts a batch on the GPU that code is lowered for. None: it has no work schedules, and
    no other code for steps of decode rows only."""
    return CUTS[implementation](heads) if implementation in CUTS else None


def available(q: DTypeLike, pages: DTypeLike, heads: Heads, page_size: int) -> list[str]:
    """Implementations that support these shapes on JAX's default backend, in the order of `best`, without the reference."""
    match jax.default_backend():
        case "cpu":
            return ["cpu"]
        case "gpu":
            return gpu_kernels.available_attention(q, pages, heads, page_size)
        case "tpu" if tpu_kernels.is_supported(q, pages):
            return ["tpu"]
        case _:
            return []


def best(q: DTypeLike, pages: DTypeLike, heads: Heads, page_size: int, *, plain: bool) -> str:
    """The implementation that `auto` stands for on JAX's default backend. `plain`: whether the scoring of any layer is
    (`Scoring`); all layers share a step's schedules, and so an implementation."""
    return (available(q, pages, heads, page_size) or ["reference"])[0 if plain else -1]
