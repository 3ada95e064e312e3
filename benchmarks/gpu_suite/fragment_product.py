"""Products with quantised weights that lie as wgmma's operand in registers, for Hopper, in Pallas' Mosaic GPU backend.

A contender of `products`, which no GPU has run yet: the engine does not use it. The product is computed transposed, so that
the weight is wgmma's first operand, which may come from registers, and the rows of `x` its second. Words of the weight lie in
the order in which threads hold that operand: a thread loads 16 bytes and has its 32 numbers of 4 bits in four products by
shifts and masks. A block serves 128 columns. Each of its warpgroups takes a part of the inputs and has a warp that feeds it by
TMA; their sums are added in shared memory, and those of several blocks by XLA.

Scales of groups multiply sums, not weights: before a group is added, the sums so far are multiplied by the scale of the group
before over its own, and the last group's scale multiplies the result.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt32

ROWS = 64  # columns of the weight in a product: the rows of wgmma's first operand
TILES = 2  # of so many columns in a block
DEPTH = 128  # inputs of a step, and of a group
HALF = 64  # inputs of a product: two bytes of each fill a swizzle
LANES = 64  # words in a stored row
CHUNK = ROWS * HALF // 8 // LANES  # stored rows that a thread reads at once, four words of them
MULTIPROCESSORS = 132
SHARED_BYTES = 230_000  # of a block, its only one on a multiprocessor
MOST_PARTS, MOST_STAGES, MOST_TOKENS = 4, 6, 64
WORDS = plgpu.Layout.WG_STRIDED((CHUNK, LANES), vec_size=4)
BY_COLUMN = plgpu.Layout.WGMMA.reduce(1)
MASKS = {"int4": (0x000F000F,), "int8": (0x007F007F, 0x00800080), "float8_e4m3fn": (0x07F007F0, 0x80008000)}
"""Of the bits of two numbers in a word. They are an operand of the kernel: the assembler would write a constant into a register
anew for every use."""
ONE_TWENTY_EIGHT = np.uint32(0x43004300)  # twice in bfloat16, whose lowest bit then counts 1


class Fragments(NamedTuple):
    """A weight of `inputs` × `outputs` numbers, both multiples of 128; inputs are at least 384.

    Attributes:
        words: `[outputs / 64, inputs / 128, R, 64]`: the numbers of 64 columns and 128 inputs; where every group of 128 inputs
            has a scale, also a row with the factors of earlier sums, in float32.
        scales: `[groups, outputs]`; one group: of whole columns.
    """

    words: UInt32[Array, "M S R L"]
    scales: Float[Array, "G N"]


class Cut(NamedTuple):
    """How a product is divided: tokens of a block; its warpgroups; parts of the inputs in blocks of their own; and steps of a
    warpgroup that have buffers."""

    tokens: int
    warpgroups: int
    parts: int
    stages: int


class Shared(NamedTuple):
    """Shared memory of a block; barriers signal which buffers are filled, and which may be overwritten."""

    x: Any  # [warpgroups, stages, tokens, DEPTH]
    words: Any  # [warpgroups, stages, TILES, R, LANES]
    there: Any
    free: Any
    sums: Any  # [warpgroups - 1, TILES, ROWS, tokens]
    summed: Any
    out: Any  # [tokens, TILES · ROWS]


def arrange(numbers: Shaped[Array, "K N"], scales: Float[Array, "G N"]) -> Fragments:
    """A weight of the products of numbers in int4, int8 or float8_e4m3fn with scales of groups of 128 inputs, or of columns."""
    (inputs, outputs), scales = numbers.shape, scales.astype(jnp.float32)
    is_zero, safe = jnp.repeat(scales == 0, inputs // len(scales), axis=0), jnp.where(scales == 0, 1.0, scales)
    numbers = jnp.where(is_zero, jnp.zeros_like(numbers), numbers)
    has_4_bits = numbers.dtype == jnp.int4
    bits = numbers.astype(jnp.int8) + 8 if has_4_bits else lax.bitcast_convert_type(numbers, jnp.uint8)
    # inputs: step, half, product, upper eight, lane, which of a pair; columns: tile, warp, upper eight, lane
    by_place = bits.astype(jnp.uint32).reshape(-1, 2, 4, 2, 4, 2, outputs // ROWS, 4, 2, 8)
    order = (6, 0, 1, 7, 9, 4, 2, 5, 3, 8) if has_4_bits else (6, 0, 1, 3, 7, 9, 4, 2, 5, 8)
    shifts = np.arange(0, 32, 4 if has_4_bits else 8, dtype=np.uint32)
    by_word = by_place.transpose(order).reshape(outputs // ROWS, inputs // DEPTH, -1, LANES, len(shifts))
    words = (by_word << shifts).sum(-1, dtype=jnp.uint32)
    if len(scales) > 1:
        fades = jnp.concatenate([jnp.ones((1, outputs)), safe[:-1] / safe[1:]]).reshape(len(scales), -1, 1, ROWS)
        fades = lax.bitcast_convert_type(fades.astype(jnp.float32), jnp.uint32)
        words = jnp.concatenate([words, fades.swapaxes(0, 1)], axis=2)
    return Fragments(words, safe)


def cut_for(num_tokens: int, weight: Fragments) -> Cut:
    """How a product of so many tokens is divided."""
    num_tiles, steps, height, _ = weight.words.shape
    tokens = min(MOST_TOKENS, max(8, 1 << (num_tokens - 1).bit_length()))
    warpgroups = 3 if tokens <= 16 else 2  # as many as have registers enough to unpack beside products
    sums = 4 * TILES * ROWS * tokens * warpgroups  # the result among them
    stage = warpgroups * (2 * tokens * DEPTH + 4 * TILES * height * LANES)
    blocks, most_parts = num_tiles // TILES * pl.cdiv(num_tokens, tokens), min(MOST_PARTS, steps // warpgroups)
    parts = min(range(1, most_parts + 1), key=lambda count: pl.cdiv(blocks * count, MULTIPROCESSORS) / count)
    return Cut(tokens, warpgroups, parts, min(MOST_STAGES, (SHARED_BYTES - sums) // stage))


@partial(jax.jit, static_argnames=("kind", "out", "interpret"))
def product(
    x: Float[Array, "T K"], weight: Fragments, *, kind: str, out: DTypeLike = jnp.bfloat16, interpret: Any = None
) -> Float[Array, "T N"]:
    """`x @ weight`, summed in float32.

    Args:
        x: in bfloat16.
        kind: type of the weight's numbers, see `MASKS`.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.
    """
    num_tiles, _, height, _ = weight.words.shape
    cut = cut_for(len(x), weight)
    buffers = cut.warpgroups * cut.stages
    swizzled = (plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    kept = jnp.float32 if cut.parts > 1 else out
    shared = Shared(
        x=plgpu.SMEM((cut.warpgroups, cut.stages, cut.tokens, DEPTH), x.dtype, transforms=swizzled),
        words=plgpu.SMEM((cut.warpgroups, cut.stages, TILES, height, LANES), jnp.uint32),
        there=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
        free=plgpu.Barrier(num_barriers=buffers),
        sums=plgpu.SMEM((cut.warpgroups - 1, TILES, ROWS, cut.tokens), jnp.float32),
        summed=plgpu.Barrier(num_arrivals=cut.warpgroups),
        out=plgpu.SMEM((cut.tokens, TILES * ROWS), kept),
    )

    def fragment_product(*refs):
        _kernel(*refs, cut=cut, kind=kind)

    sums = plgpu.kernel(
        fragment_product,
        out_type=jax.ShapeDtypeStruct((cut.parts, len(x), num_tiles * ROWS), kept),
        scratch_types=[shared],
        grid=(num_tiles // TILES, pl.cdiv(len(x), cut.tokens), cut.parts),
        grid_names=("block", "tokens", "part"),
        num_threads=cut.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x, *weight, jnp.asarray(MASKS[kind], jnp.uint32))
    return sums[0] if cut.parts == 1 else sums.sum(0).astype(out)


def _kernel(
    x_ref,  # [T, K]
    words_ref,  # [N / ROWS, K / DEPTH, R, LANES]
    scales_ref,  # [G, N]
    masks_ref,
    out_ref,  # [parts, T, N]
    shared: Shared,
    *,
    cut: Cut,
    kind: str,
):
    """The sums of the columns of a block for a tile of tokens over one part of the inputs."""
    block, part, warpgroup = lax.axis_index("block"), lax.axis_index("part"), lax.axis_index("warpgroup")
    tokens = pl.ds(lax.axis_index("tokens") * cut.tokens, cut.tokens)

    def span(warpgroup):
        place, num_places, num_steps = part * cut.warpgroups + warpgroup, cut.parts * cut.warpgroups, words_ref.shape[1]
        return lax.div(place * num_steps, num_places), lax.div((place + 1) * num_steps, num_places)

    @pl.when(warpgroup == cut.warpgroups)
    def _():
        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")
            feed = partial(_feed, shared, x_ref, words_ref, tokens, block, warp, cut)
            pl.when(warp < cut.warpgroups)(lambda: feed(*span(warp)))

    @pl.when(warpgroup < cut.warpgroups)
    def _():
        start, end = span(warpgroup)
        unpack = partial(_unpack, kind, [masks_ref[place] for place in range(len(MASKS[kind]))])
        add = partial(_add, shared, warpgroup, end - start, cut, unpack, scales_ref.shape[0] > 1)
        sums = pl.run_scoped(add, *[plgpu.WGMMAAccumulatorRef((ROWS, cut.tokens), jnp.float32)] * TILES)
        scales = scales_ref.at[jnp.minimum(end, scales_ref.shape[0]) - 1]
        for tile in range(TILES):
            by_column = scales.at[pl.ds((block * TILES + tile) * ROWS, ROWS)]
            sums[tile] *= _across(plgpu.load(by_column, layout=BY_COLUMN, optimized=False), cut)

        @pl.when(warpgroup > 0)
        def _():
            for tile in range(TILES):
                shared.sums.at[warpgroup - 1, tile][...] = sums[tile]
            plgpu.barrier_arrive(shared.summed)

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_arrive(shared.summed)
            plgpu.barrier_wait(shared.summed)
            for tile, total in enumerate(sums):
                for other in range(cut.warpgroups - 1):
                    total += plgpu.load(shared.sums.at[other, tile], layout=plgpu.Layout.WGMMA, optimized=False)
                turned = plgpu.layout_cast(total.astype(out_ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.transpose_ref(shared.out.at[:, pl.ds(tile * ROWS, ROWS)], (1, 0))[...] = turned
            plgpu.commit_smem()
            columns = pl.ds(block * TILES * ROWS, TILES * ROWS)
            plgpu.copy_smem_to_gmem(shared.out, out_ref.at[part, tokens, columns])
            plgpu.wait_smem_to_gmem(0)


def _feed(shared: Shared, x_ref, words_ref, tokens, block, warpgroup, cut: Cut, start, end) -> None:
    """Fetch what a warpgroup multiplies, as far ahead as there are buffers; behind the last step, only wait."""

    def fetch(step, slot):
        buffer, place = warpgroup * cut.stages + slot, (warpgroup, slot)
        pl.when(step - start >= cut.stages - 1)(lambda: plgpu.barrier_wait(shared.free.at[buffer]))

        @pl.when(step < end)
        def _():
            words = words_ref.at[pl.ds(block * TILES, TILES), step]
            plgpu.copy_gmem_to_smem(words, shared.words.at[place], shared.there.at[buffer])
            x = x_ref.at[tokens, pl.ds(step * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(x, shared.x.at[place], shared.there.at[buffer])

        return _after(slot, cut)

    lax.fori_loop(start, end + cut.stages - 1, fetch, 0)


def _add(shared: Shared, warpgroup, num_steps, cut: Cut, unpack, grouped: bool, *accumulators):
    """The sums of a warpgroup's steps, divided by the scales of its last group."""

    def add(_, slots):
        before, slot = slots
        plgpu.barrier_wait(shared.there.at[warpgroup * cut.stages + slot])
        for tile, accumulator in enumerate(accumulators):
            stored, x = shared.words.at[warpgroup, slot, tile], shared.x.at[warpgroup, slot]
            height = (stored.shape[0] - grouped) // 2
            for half in range(2):
                numbers = unpack(stored.at[pl.ds(half * height, height)])
                if tile == half == 0:  # unpacked beside the products of the step before
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()  # orders the loads of words before what overwrites them
                    plgpu.barrier_arrive(shared.free.at[warpgroup * cut.stages + before])
                if half == 0 and grouped:
                    fade = plgpu.load(stored.at[stored.shape[0] - 1], layout=BY_COLUMN, optimized=False)
                    sums = plgpu.wgmma_accumulator_load(accumulator, wait_n=None)
                    accumulator[...] = sums * _across(lax.bitcast_convert_type(fade, jnp.float32), cut)
                plgpu.wgmma(accumulator, numbers, x.at[:, pl.ds(half * HALF, HALF)].transpose((1, 0)))
        return slot, _after(slot, cut)

    # The first step frees the last buffer, which nothing has filled: `_feed` waits from the step before it is used again.
    lax.fori_loop(0, num_steps, add, (cut.stages - 1, 0))
    return [plgpu.wgmma_accumulator_load(accumulator) for accumulator in accumulators]


def _after(slot, cut: Cut):
    return jnp.where(slot == cut.stages - 1, 0, slot + 1)


def _across(by_column, cut: Cut):
    """A number for each column, for all tokens `[ROWS, tokens]`."""
    return lax.broadcast_in_dim(by_column, (ROWS, cut.tokens), [0])


def _unpack(kind: str, masks, words_ref):
    """Numbers of 64 columns and 64 inputs in bfloat16 `[ROWS, HALF]`, in wgmma's layout."""
    words = [plgpu.load(words_ref.at[pl.ds(row, CHUNK)], layout=WORDS) for row in range(0, words_ref.shape[0], CHUNK)]
    if kind == "int4":
        moved = [words[0], *(words[0] >> np.uint32(bits) for bits in (4, 8, 12))]
        near = fragments(*(pairs & masks[0] | ONE_TWENTY_EIGHT for pairs in moved))
        return near - jnp.bfloat16(128 + 8)
    if kind == "int8":
        moved = [pairs for word in words for pairs in (word, word >> np.uint32(8))]
        lower, sign = (fragments(*(pairs & mask | ONE_TWENTY_EIGHT for pairs in moved)) for mask in masks)
        return lower - sign  # of -1: 255 - 256
    moved = [pairs for word in words for pairs in (word << np.uint32(8), word)]
    shares = fragments(*(pairs >> np.uint32(4) & masks[0] | pairs & masks[1] for pairs in moved))
    return shares * jnp.bfloat16(2.0**120)


def fragments(*pairs):
    """Numbers `[ROWS, HALF]` of the words that have two neighbours each: of a thread's first pair in each product, of the pairs
    eight columns, eight inputs and both further."""
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    wgmma = plgpu.ShapeDtypeStruct((ROWS, HALF), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(WORDS,) * len(pairs), return_type=wgmma)
    def renamed(_, *pairs):
        registers = np.empty(WGMMA_LAYOUT.registers_shape((ROWS, HALF)), object)
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        for place, words in enumerate(pairs):
            for number in range(4):
                word = vector.extract(words.registers.item(), [], [number])
                registers.flat[4 * number + place] = mgpu.utils.bitcast(word, two)
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA_LAYOUT, _is_signed=None)

    return renamed(*pairs)
