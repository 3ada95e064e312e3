"""What the kernels for NVIDIA GPUs from Ampere on can compute, and their tiles. Imports no compiler.

The sizes are powers of two that leave room for several blocks on a multiprocessor and spill no registers, by compiling them for
A100 and H100. None was measured on a GPU yet: `num_stages`, `tokens` and the rows of chunks are the first to try.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfercept.pallas.layouts.kv_rows import is_quantised
from jinfercept.pallas.layouts.pages import HeadRows, KVPages
from jinfercept.pallas.work_schedule import WorkCut

SHARED_MEMORY_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448}
"""Shared memory that one block may have, by compute capability; `LITTLE_SHARED_MEMORY_BYTES` for all others."""

LITTLE_SHARED_MEMORY_BYTES = 101_376
HOPPER = 90
WARP = 32  # threads
WARPGROUP_ROWS = 64  # of one wgmma of four warps
LEAST_ROWS = 16  # of a matrix product in Triton
LEAST_TOKENS = 16
MOST_ACCUMULATORS = 20_480  # of 8 warps that hold their other operands in registers too
REGISTERS = 65_536  # of a multiprocessor
DECODE_REGISTERS = {False: {64: 128, 128: 168, 256: 168, 512: 168}, True: {64: 168, 128: 168, 256: 168, 512: 216}}
"""Of a thread of the decode kernels, by whether pages are quantised and by padded head dim, compiled for H100 and A100.

The blocks that run at once on a multiprocessor follow from them: `tests/aot` compares both with compiled kernels.
"""

EXACT_DECODE_BLOCKS = 2  # in float32
BLOCK_BYTES = 3584  # of shared memory that a block has beside queries, keys and values: page numbers, and the system's


class Tile(NamedTuple):
    """One kernel's tile, and Triton's compiler parameters."""

    rows: int  # (query, head) pairs; the query heads of one KV head lie side by side
    tokens: int  # context tokens per turn of the loop
    num_warps: int
    num_stages: int  # of the loop's pipeline


class Tiles(NamedTuple):
    """The tiles of rows with one query and of chunks; and the programs of the decode kernel that run at once, one wave."""

    decode: Tile
    chunk: Tile
    programs: int


def choose_tiles(
    head_dim: int,
    group: int,
    itemsize: int,
    compute_capability: int,
    num_multiprocessors: int,
    *,
    quantised: bool = False,
) -> Tiles:
    """The tiles for a model on a GPU.

    Args:
        group: query heads per KV head.
        itemsize: bytes of a query's number.
        compute_capability: 80 for A100, 90 for H100.
        num_multiprocessors: 108 on A100, 132 on H100.
        quantised: whether pages are. Widening takes registers, so the chunk tiles for Hopper get smaller.
    """
    width, rows = power_of_two(head_dim), max(LEAST_ROWS, power_of_two(group))
    if itemsize == 4:  # multiplied without tensor cores, from registers
        exact = Tile(rows, LEAST_TOKENS, num_warps=8, num_stages=3)
        decode = exact._replace(num_stages=2 if quantised else 1)  # with others some shapes spill registers
        return Tiles(decode, exact, num_multiprocessors * EXACT_DECODE_BLOCKS)
    shared_bytes = SHARED_MEMORY_BYTES.get(compute_capability, LITTLE_SHARED_MEMORY_BYTES)
    decode_tokens = _tokens(rows, width * itemsize, 1, shared_bytes // 4)
    if quantised and rows == 2 * LEAST_ROWS:  # of 64 tokens they spill, where fewer and more rows do not
        decode_tokens = min(decode_tokens, 32)
    hopper = compute_capability >= HOPPER
    if width == 256 and group in (2, 4):  # of 32 tokens they spill, where other groups do not
        decode_tokens = LEAST_TOKENS
    # Chunks on H100, in bfloat16 with head dim 128, by `ptxas` (rows x context tokens, registers of a thread, shared memory,
    # blocks per multiprocessor): 128 x 64 has 170, 96 KiB and one; 64 x 64 has 188, 81 KiB and two; 64 x 32 has 156, 48 KiB and
    # three. A block waits for each of its products, so there are two blocks: one computes the softmax while the other
    # multiplies.
    chunk_rows = max(rows, 128 if width <= 128 and not hopper else WARPGROUP_ROWS)
    chunk_tokens = _tokens(chunk_rows, width * itemsize, 2 if hopper else 1, shared_bytes // 2)
    if width > 256:  # the sums of more rows spill
        chunk_rows, chunk_tokens = max(rows, 32), 32
    if not hopper and chunk_rows * (width + chunk_tokens) > MOST_ACCUMULATORS:
        chunk_tokens = max(LEAST_TOKENS, chunk_tokens // 2)
    decode_bytes = (rows + 2 * decode_tokens) * width * itemsize + BLOCK_BYTES
    decode_warps = 8 if rows > LEAST_ROWS else 4  # so many rows spill registers of four
    block_registers = decode_warps * WARP * DECODE_REGISTERS[quantised][max(width, 64)]
    decode_blocks = max(1, min(REGISTERS // block_registers, shared_bytes // decode_bytes))
    few_warps = hopper and chunk_rows == WARPGROUP_ROWS
    if quantised and few_warps and width > 64:
        chunk_tokens, few_warps = max(LEAST_TOKENS, chunk_tokens // 2), False
    return Tiles(
        decode=Tile(rows, decode_tokens, decode_warps, num_stages=3),
        chunk=Tile(chunk_rows, chunk_tokens, num_warps=4 if few_warps else 8, num_stages=3),
        programs=num_multiprocessors * decode_blocks,
    )


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _tokens(rows: int, row_bytes: int, buffers: int, shared_bytes: int) -> int:
    # In three stages a tile of keys and values has one buffer, or two where tensor cores read it from shared memory (Hopper):
    # the loads of the page numbers, which it waits for, take the other stages.
    fitting = (tokens for tokens in (64, 32) if (rows + 2 * buffers * tokens) * row_bytes <= shared_bytes)
    return next(fitting, LEAST_TOKENS)


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

    @classmethod
    def of(cls, q: HeadRows, pages: KVPages) -> "Heads":
        """The heads of queries over these pages."""
        return cls(q.shape[1], pages.shape[3], q.shape[2], q.dtype.itemsize, is_quantised(pages.dtype))

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
