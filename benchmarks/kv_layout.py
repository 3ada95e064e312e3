"""Which axis order the pages of a layer should have: an engine's jobs in four orders, side by side in one run.

The jobs: write a step's tokens in place, read the pages in decode attention, and gather pages of several layers for a
copy to the host. All candidates for a job take turns, so that a busy machine slows them alike, and each one's fastest
turn counts. Decode attention is tried in three formulations and every order gets its best one.

    python benchmarks/kv_layout.py --dtype bfloat16

`jinfercept/layouts/pages.py` holds the order that was chosen. Letters as there; `c` is the axis of key and value.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import dynamic_slice_in_dim as window
from jaxtyping import Array, Float, Int

CANONICAL = "NBcKD"  # the order of `KVPages`, that the others are compared with
ORDERS = (CANONICAL, "NcBKD", "NcKBD", "NBKcD")
SIZES = {"N": 2304, "B": 16, "c": 2, "K": 3, "D": 64}  # SmolLM2-135M, a pool for 32 contexts of 1,024 tokens and some
GROUP = 3
NUM_ROWS, ROWS_AT_ONCE, PAGES_AT_ONCE = 32, 8, 4
COPY_PAGES, COPY_LAYERS = 8, 4


def write(
    pages: Array, new: Float[Array, "T 2 K D"], page: Int[Array, "T"], offset: Int[Array, "T"], *, order: str
) -> Array:
    """Every token's key and value into its page, in place when `pages` is donated."""
    where = tuple({"N": page, "B": offset}.get(axis, slice(None)) for axis in order)
    rest = order.replace("N", "").replace("B", "")
    return pages.at[where].set(jnp.transpose(new, (0, *(1 + "cKD".index(axis) for axis in rest))))


def head_slices(
    pages: Array, table: Int[Array, "R p"], order: str, *, one_gather: bool
) -> Iterator[Float[Array, "R t D"]]:
    """Keys and values by head, keys first: sliced from one gather of whole pages, or gathered head by head."""
    split = order.index("B") + 1
    outer, inner = order[1:split], order[split:]  # `inner` lies behind the tokens: one long row per token
    rows = pages.reshape(*pages.shape[:split], -1)
    tile = rows[table]  # [R, p, *outer, row]
    for index in np.ndindex(SIZES["c"], SIZES["K"]):
        at = dict(zip("cK", index, strict=True))
        first = int(np.ravel_multi_index([at.get(axis, 0) for axis in inner], [SIZES[axis] for axis in inner]))
        where = (*(at.get(axis, slice(None)) for axis in outer), slice(first, first + SIZES["D"]))
        part = tile[(slice(None), slice(None), *where)] if one_gather else rows[(table, *where)]
        yield part.reshape(table.shape[0], -1, SIZES["D"]).astype(jnp.float32)


def products(pages: Array, table: Int[Array, "R p"], order: str, formulation: str):
    """How scores and weighted values of one tile are computed: two functions over `[K, R, G, ·]`."""
    if formulation == "batched":
        tile = jnp.transpose(pages[table].astype(jnp.float32), [0, 1, *(2 + order[1:].index(axis) for axis in "BcKD")])
        tile = tile.reshape(table.shape[0], -1, SIZES["c"], SIZES["K"], SIZES["D"])
        return (
            lambda q: jnp.einsum("krgd,rtkd->krgt", q, tile[:, :, 0]),
            lambda weights: jnp.einsum("krgt,rtkd->krgd", weights, tile[:, :, 1]),
        )
    heads = list(head_slices(pages, table, order, one_gather=formulation == "one gather"))
    keys, values = heads[: SIZES["K"]], heads[SIZES["K"] :]
    return (
        lambda q: jnp.stack([jnp.einsum("rgd,rtd->rgt", *pair) for pair in zip(q, keys, strict=True)]),
        lambda weights: jnp.stack([jnp.einsum("rgt,rtd->rgd", *pair) for pair in zip(weights, values, strict=True)]),
    )


def decode(
    pages: Array, q: Float[Array, "K S G D"], tables: Int[Array, "S P"], num_tiles: int, *, order: str, formulation: str
) -> Float[Array, "K S G D"]:
    """Attention of one query per row over `num_tiles` full tiles of pages: online softmax, some rows at a time."""

    def some_rows(index, out):
        mine = window(q, index * ROWS_AT_ONCE, ROWS_AT_ONCE, axis=1)
        table = window(tables, index * ROWS_AT_ONCE, ROWS_AT_ONCE)

        def page_tile(index, carry):
            top, total, weighted = carry
            part = window(table, index * PAGES_AT_ONCE, PAGES_AT_ONCE, axis=1)
            scores_of, values_of = products(pages, part, order, formulation)
            scores = scores_of(mine)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            return new_top, total * fade + weights.sum(-1), weighted * fade[..., None] + values_of(weights)

        nothing_yet = (jnp.full(mine.shape[:-1], -1e30), jnp.zeros(mine.shape[:-1]), jnp.zeros_like(mine))
        _, total, weighted = jax.lax.fori_loop(0, num_tiles, page_tile, nothing_yet)
        return jax.lax.dynamic_update_slice_in_dim(out, weighted / total[..., None], index * ROWS_AT_ONCE, axis=1)

    return jax.lax.fori_loop(0, NUM_ROWS // ROWS_AT_ONCE, some_rows, jnp.zeros_like(q))


def offload(layers: list[Array], page_ids: Int[Array, "k"]) -> list[Array]:
    """One array per page, all layers in it, as a copy to the host takes them."""
    return list(jnp.stack([pages[page_ids] for pages in layers], axis=1))


def fastest_ms(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Each candidate's fastest turn in milliseconds; they take turns."""
    for run in candidates.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began))
    return best


def measure_writes(pools: dict[str, Array], num_tokens: int, rounds: int) -> dict[str, float]:
    """Replaces the pools by the written ones."""
    rng = np.random.default_rng(num_tokens)
    page, offset = np.divmod(rng.permutation(SIZES["N"] * SIZES["B"])[:num_tokens], SIZES["B"])
    new = jnp.ones((num_tokens, SIZES["c"], SIZES["K"], SIZES["D"]), pools[CANONICAL].dtype)
    page, offset = jnp.asarray(page), jnp.asarray(offset)
    writers = {order: jax.jit(partial(write, order=order), donate_argnums=0) for order in ORDERS}

    def run(order: str) -> Array:
        pools[order] = writers[order](pools[order], new, page, offset)
        return pools[order]

    return fastest_ms({order: partial(run, order) for order in ORDERS}, rounds)


def measure_decode(
    pools: dict[str, Array], context_tokens: int, rounds: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Each order's fastest formulation: its time and its name."""
    rng = np.random.default_rng(context_tokens)
    pages_per_row = context_tokens // SIZES["B"]
    tables = jnp.asarray(1 + rng.permutation(SIZES["N"] - 1)[: NUM_ROWS * pages_per_row].reshape(NUM_ROWS, -1))
    q = jnp.asarray(rng.standard_normal((SIZES["K"], NUM_ROWS, GROUP, SIZES["D"])), jnp.float32) / 8
    runs, want = {}, None
    for order in ORDERS:
        for formulation in ("one gather", "by head", "batched"):
            attend = jax.jit(partial(decode, order=order, formulation=formulation))
            run = partial(attend, pools[order], q, tables, pages_per_row // PAGES_AT_ONCE)
            want = run() if want is None else want
            np.testing.assert_allclose(run(), want, atol=1e-4)
            runs[f"{order}/{formulation}"] = run
    measured = fastest_ms(runs, rounds)
    times, chosen = {}, {}
    for order in ORDERS:
        name = min((name for name in measured if name.startswith(order)), key=measured.__getitem__)
        times[order], chosen[order] = measured[name], name.split("/")[1]
    return times, chosen


def measure_copy_out(pools: dict[str, Array], rounds: int) -> dict[str, float]:
    page_ids = jnp.asarray(np.random.default_rng(0).permutation(SIZES["N"])[:COPY_PAGES])
    gather = jax.jit(offload)
    return fastest_ms({order: partial(gather, [pools[order]] * COPY_LAYERS, page_ids) for order in ORDERS}, rounds)


def show(job: str, times: dict[str, float], notes: dict[str, str] | None = None) -> None:
    cells = [f"{times[order]:8.3f} ms {times[order] / times[CANONICAL]:5.2f}× " for order in ORDERS]
    if notes:
        cells = [f"{cell}{notes[order]}" for cell, order in zip(cells, ORDERS, strict=True)]
    print(f"{job:<28}" + "".join(f"{cell:<32}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="what the pages hold")
    parser.add_argument("--rounds", type=int, default=30, help="turns that each candidate takes")
    args = parser.parse_args()

    canonical = jax.random.normal(jax.random.key(0), [SIZES[axis] for axis in CANONICAL], args.dtype)
    pools = {order: jnp.transpose(canonical, [CANONICAL.index(axis) for axis in order]).copy() for order in ORDERS}
    print(f"{args.dtype} on {jax.default_backend()}, best of {args.rounds}; times and ratios to {CANONICAL}")
    print(f"{'':<28}" + "".join(f"{'[' + ', '.join(order).replace('c', '2') + ']':<32}" for order in ORDERS))
    for context_tokens in (256, 1024):
        show(f"decode {NUM_ROWS} × {context_tokens}", *measure_decode(pools, context_tokens, args.rounds))
    show(f"copy out {COPY_PAGES} pages, {COPY_LAYERS} layers", measure_copy_out(pools, args.rounds))
    for num_tokens in (1, 32, 256):
        show(f"write {num_tokens} tokens", measure_writes(pools, num_tokens, args.rounds))


if __name__ == "__main__":
    main()
