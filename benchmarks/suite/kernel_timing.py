"""Times kernels by themselves, by any implementation: paged attention, and products with the weights of experts.

Every call of a turn of attention reads other pages, together more than the caches hold, and all inputs lie on the device:
random pages, scattered page tables, and the ragged batch of some rows. Rows: the case (`model`, `heads`, `rows`, `chunk`,
`context`), `implementation`, `seconds` and its extremes, `bytes_per_s` (keys and values, read once) and `copy_share` of the
copy bandwidth, `flops_per_s`, `matmul_share`; or `error` in place of all that.

Products stand beside XLA's `ragged_dot`. Rows: `model`, `tokens`, `used` experts, and the same with the weights of these
experts, read once, as bytes; `off`, the largest difference from XLA's product with the same numbers as a share of the largest
number; or `error`. Rows of our kernel have `ok`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from benchmarks.prepared_batch import prepare
from benchmarks.suite.sizes import MIB, AttentionCase, ExpertsCase, HeadSizes, Row, Sizes
from benchmarks.suite.timing import RunTiming, copy_rate, matmul_rate, timed
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.pallas.layouts.interleaved import interleaved_shape
from jinfercept.pallas.layouts.pages import Batch, KVPages, kv_shape
from jinfercept.pallas.work_schedule import WorkCut
from jinfercept.runner.packing import PackedShape, pack, unpack
from jinfercept.sched.plan import Chunk

BLOCK_PAGES = 1024


def random_pages(heads: HeadSizes, num_pages: int, sizes: Sizes) -> KVPages:
    """One layer's pages; a block of random ones, repeated."""
    if sizes.interleaved:
        shape = interleaved_shape(num_pages, sizes.page_size, heads.kv, heads.dim, sizes.dtype)
    else:
        shape = kv_shape(num_pages, sizes.page_size, heads.kv, heads.dim)
    block, ones = min(BLOCK_PAGES, num_pages), (1,) * (len(shape) - 1)

    @jax.jit
    def draw(key: Array) -> KVPages:
        drawn = jax.random.uniform(key, (block, *shape[1:]), sizes.dtype, -1.0, 1.0)
        return jnp.tile(drawn, (-(-num_pages // block), *ones))[:num_pages]

    return draw(jax.random.key(0))


def interleaved(pages: KVPages) -> KVPages:
    """Pages `[N, B, 2, K, W]` as those of TPUs lie; the slots of zeros beside them are zero."""
    num_pages, page_size, _, num_kv_heads, head_dim = pages.shape
    shape = interleaved_shape(num_pages, page_size, num_kv_heads, head_dim, pages.dtype)
    missing = shape[2] // 2 - num_kv_heads, shape[3] - head_dim
    padded = jnp.pad(pages, ((0, 0),) * 3 + ((0, missing[0]), (0, missing[1])))
    return jnp.moveaxis(padded, 2, 3).reshape(shape)


def make_batch(
    rows: Sequence[tuple[int, int]],
    tables: Int32[np.ndarray, "S P"],
    page_size: int,
    spare_tokens: int = 0,
    spare_rows: int = 0,
) -> Batch:
    """The batch of such rows, each (start, query tokens), those of one token first.

    Args:
        rows: row by row.
        tables: their pages.
        spare_tokens, spare_rows: padding.
    """
    chunks = tuple(Chunk(slot, start, (1,) * tokens, (), None) for slot, (start, tokens) in enumerate(rows))
    num_tokens = sum(tokens for _, tokens in rows) + spare_tokens
    shape = PackedShape(num_tokens, len(rows) + spare_rows, tables.shape[1])
    packed = pack(chunks, tables, page_size, shape)
    return jax.jit(unpack, static_argnums=2)(packed, np.zeros(len(rows), np.int32), shape)


def scattered_batches(case: AttentionCase, num_pages: int, page_size: int, count: int, width: int) -> list[Batch]:
    """So many batches of one case, whose pages lie all over the pool, as different from each other as the pool allows.

    Args:
        num_pages: of the pool, the scratch page included.
        width: pages of a row of the table.
    """
    each = -(-case.context // page_size)
    order = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    rows = [(case.context - case.chunk, case.chunk)] * case.rows
    batches = []
    for index in range(count):
        taken = np.arange(index * case.rows * each, (index + 1) * case.rows * each) % order.size
        tables = np.zeros((case.rows, width), np.int32)
        tables[:, :each] = order[taken].reshape(case.rows, each)
        batches.append(make_batch(rows, tables, page_size))
    return batches


def random_queries(heads: HeadSizes, num_tokens: int, dtype: str) -> Float[Array, "T H D"]:
    """Queries of one step."""
    return jax.random.normal(jax.random.key(1), (num_tokens, heads.query, heads.dim), dtype)


BEYOND_CACHE_BYTES = 512 * MIB
MOST_INPUTS = 128
ERROR_CHARACTERS = 300

type Measure = Callable[[Sizes, AttentionCase], RunTiming]
type Candidates = Callable[[KVPages, AttentionCase], Mapping[str, Measure]]
"""How each implementation is timed on a case, in the order in which they are."""


def attention_rows(sizes: Sizes, cases: Sequence[AttentionCase], candidates: Candidates) -> Iterator[Row]:
    """Measure all cases that fit, the pages of one kind of heads at a time."""
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    pages, drawn = None, None
    for case in cases:
        if case.kv_bytes > sizes.attention_pool_bytes:
            continue
        if drawn != case.heads:
            pages = None  # the last ones go before the next ones come
            pages, drawn = random_pages(case.heads, _num_pages(sizes, case), sizes), case.heads
        assert pages is not None
        for name, measure in candidates(pages, case).items():
            row = case.describe() | {"implementation": name}
            try:
                timing = measure(sizes, case)
            except Exception as error:  # a peer may refuse a shape, and a kernel may fail on one
                yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
            else:
                yield row | _reached(case, timing, sizes.calls, copy, matmul)


def time_paged(
    attend: Callable[..., Array], cut: WorkCut | None, pages: KVPages, sizes: Sizes, case: AttentionCase
) -> RunTiming:
    """Time an implementation over these pages.

    Args:
        attend: takes queries, pages and a batch.
        cut: how it cuts batches.
    """
    longest = max(other.context for other in sizes.attention if other.heads == case.heads)
    width = -(-longest // sizes.page_size)
    batches = scattered_batches(case, pages.shape[0], sizes.page_size, num_inputs(case), width)
    q = random_queries(case.heads, case.rows * case.chunk, sizes.dtype)
    prepared = jax.device_put(
        [prepare(batch, cut, decode_only=case.chunk == 1) for batch in batches]
    )  # made by the host
    return time_calls(sizes, attend, q, [(pages, batch) for batch in prepared])


def _reached(case: AttentionCase, timing: RunTiming, calls: int, copy: float, matmul: float) -> Row:
    seconds = timing.seconds / calls
    return {
        "seconds": seconds,
        "fastest_s": timing.fastest_s / calls,
        "slowest_s": timing.slowest_s / calls,
        "bytes_per_s": case.kv_bytes / seconds,
        "copy_share": case.kv_bytes / seconds / copy,
        "flops_per_s": case.flops / seconds,
        "matmul_share": case.flops / seconds / matmul,
    }


def _num_pages(sizes: Sizes, case: AttentionCase) -> int:
    return 1 + sizes.attention_pool_bytes // (case.heads.token_bytes * sizes.page_size)


def num_inputs(case: AttentionCase) -> int:
    """Of one case, so that together they are more than a cache holds."""
    return max(1, min(MOST_INPUTS, BEYOND_CACHE_BYTES // case.kv_bytes))


def time_calls(sizes: Sizes, attend: Callable[..., Array], q: Array, inputs: Sequence[tuple[Any, ...]]) -> RunTiming:
    """Time some calls of `attend(q, *input)`, one after the other in one executable, with all inputs in turn."""

    @jax.jit
    def calls(q: Array, some: list[tuple[Any, ...]]) -> list[Array]:
        outs: list[Array] = []
        for mine in some:
            after, _ = jax.lax.optimization_barrier((q, outs[-1:]))
            outs.append(attend(after, *mine))
        return outs

    turns = cycle(inputs)
    return timed(lambda: calls(q, list(islice(turns, sizes.calls))), sizes.enough_s)


DTYPE = jnp.bfloat16
MOST_OFF = 0.02


class Candidate(NamedTuple):
    """An implementation: a stack of weights, and a product of rows with it; whether it is ours."""

    weight: Any
    multiply: Callable[..., jax.Array]
    is_ours: bool = True


def expert_rows(sizes: Sizes, candidates: Callable[[ExpertsCase, jax.Array], Mapping[str, Candidate]]) -> Iterator[Row]:
    """Measure all cases.

    Args:
        candidates: from a case and its stack of weights, by name.
    """
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    by_xla = jax.jit(jax.lax.ragged_dot)
    for case in sizes.experts:
        stack = random_stack(case)
        implementations = {**candidates(case, stack), "xla": Candidate(stack, by_xla, is_ours=False)}
        for tokens in case.tokens:
            x, group_sizes = _random_rows(case, tokens)
            used = int(np.count_nonzero(group_sizes))
            for name, (weight, multiply, is_ours) in implementations.items():
                row = {"model": case.model, "tokens": tokens, "used": used, "implementation": name}
                try:
                    timing = timed(partial(multiply, x, weight, group_sizes), sizes.enough_s)
                    off = _off(multiply(x, weight, group_sizes), by_xla(x, _dense(weight), group_sizes))
                except Exception as error:  # a peer may refuse a shape, and a kernel may fail on one
                    yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
                    continue
                num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) * used / case.num_experts
                flops = 2 * len(x) * case.inputs * case.outputs
                yield row | {
                    "seconds": timing.seconds,
                    "fastest_s": timing.fastest_s,
                    "slowest_s": timing.slowest_s,
                    "bytes_per_s": num_bytes / timing.seconds,
                    "copy_share": num_bytes / timing.seconds / copy,
                    "flops_per_s": flops / timing.seconds,
                    "matmul_share": flops / timing.seconds / matmul,
                    "off": off,
                    **({"ok": off < MOST_OFF} if is_ours else {}),
                }


def random_stack(case: ExpertsCase) -> jax.Array:
    """Weights of all experts."""
    shape = (case.num_experts, case.inputs, case.outputs)
    return jax.random.normal(jax.random.key(0), shape, DTYPE) * case.inputs**-0.5


def _random_rows(case: ExpertsCase, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Rows of every token's experts, which are drawn evenly, and how many rows each expert has."""
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(case.num_experts)[: case.per_token] for _ in range(tokens)])
    sizes = np.bincount(chosen.reshape(-1), minlength=case.num_experts).astype(np.int32)
    return jax.random.normal(jax.random.key(tokens), (chosen.size, case.inputs), DTYPE), jnp.asarray(sizes)


@jax.jit
def _dense(weight: Any) -> jax.Array:
    return weight.dense() if isinstance(weight, QuantizedTensor) else weight


def _off(y: jax.Array, expected: jax.Array) -> float:
    difference = jnp.max(jnp.abs(y.astype(jnp.float32) - expected.astype(jnp.float32)))
    return float(difference / jnp.max(jnp.abs(expected)).astype(jnp.float32))
