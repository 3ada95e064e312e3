"""What the kernels for NVIDIA GPUs from Ampere on can compute, and how they cut a model's heads. Imports no compiler."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfercept.pallas.layouts.kv_rows import is_quantised
from jinfercept.pallas.tiles import Tiles, choose_tiles
from jinfercept.pallas.work_schedule import WorkCut

AMPERE = 80  # its compute capability
AMPERE_MULTIPROCESSORS = 108
DTYPES = ("bfloat16", "float16", "float32")
LARGEST_HEAD_DIM = 512


class Heads(NamedTuple):
    """A model's numbers of heads, the bytes of a query's number, and whether pages are quantised."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    quantised: bool = False

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads


def tiles_for(heads: Heads, capability: int) -> Tiles:
    """The tiles for a model on the GPU that code is lowered for, of this compute capability."""
    sizes = heads.head_dim, heads.group, heads.itemsize
    return choose_tiles(*sizes, capability, num_multiprocessors(), quantised=heads.quantised)


def work_cut(heads: Heads, tiles: Tiles | None = None) -> WorkCut:
    """How the kernels cut a batch, by these tiles; None: those for the GPU that code is lowered for."""
    tiles = tiles or tiles_for(heads, compute_capability())
    return WorkCut(heads.num_kv_heads, tiles.programs, tiles.decode.tokens, tiles.chunk.rows // heads.group)


def is_supported(q: DTypeLike, pages: DTypeLike, head_dim: int) -> bool:
    """Whether the kernels can be compiled for queries and pages of these types."""
    dtype = jnp.dtype(q)
    alike = dtype == jnp.dtype(pages) or is_quantised(pages)
    return alike and dtype.name in DTYPES and 16 <= head_dim <= LARGEST_HEAD_DIM


def compute_capability() -> int:
    """The compute capability of the GPU that code is lowered for, such as 90 for H100. Raises `ValueError` if it is no GPU."""
    from jax.experimental.pallas.triton import get_gpu_info  # with a compiler: a fifth of a second to import

    return get_gpu_info().compute_capability


def is_lowered_for_gpu() -> bool:
    from jax.experimental.pallas.triton import is_gpu_device

    return is_gpu_device()


def num_multiprocessors() -> int:
    """The multiprocessors of the GPU that code is lowered for; those of an A100 if it is no GPU, in interpret mode."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    cores = getattr(jax.local_devices()[0], "core_count", None) if device is None else device.num_cores
    return cores or AMPERE_MULTIPROCESSORS
