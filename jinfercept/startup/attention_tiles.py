"""The tiles in which this backend's attention works, and their price, fitted to measured steps. Measures nothing."""

from collections.abc import Sequence
from itertools import accumulate

import jax
import numpy as np
from jaxtyping import Float

from jinfercept.cpu_kernels.attention import CHUNK_CONTEXT, CHUNK_QUERIES, DECODE_CONTEXT, DECODE_ROWS
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.tiled_price import AttentionTiles, TiledPrice, tile_work

TURNS = 10
NEAR = 0.03
"""Relative error beyond which a step counts less, since something disturbed it."""
LEAST_SHARE = 0.1
"""Share of a bucket's fastest step that it takes without attention, at least."""


def attention_tiles(attention: str, page_size: int) -> AttentionTiles | None:
    """The tiles of an implementation of attention, see `pallas.attention`; None if rows do not wait for each other."""
    if attention not in ("auto", "cpu") or jax.default_backend() != "cpu":
        return None
    decode_tokens, chunk_tokens = (
        max(1, sizes[0] // page_size) * page_size for sizes in (DECODE_CONTEXT, CHUNK_CONTEXT)
    )
    narrow, wide = CHUNK_QUERIES
    return AttentionTiles(DECODE_ROWS, decode_tokens, narrow, wide, chunk_tokens)


def fit_tiles(tiles: AttentionTiles, steps: Sequence[tuple[StepPlan, float]]) -> TiledPrice:
    """The price that is nearest to measured steps: least absolute relative errors, and no term below 0.

    Args:
        steps: plans with all of the buckets, and their seconds.
    """
    buckets = sorted({plan.bucket for plan, _ in steps})
    seconds = np.array([step_s for _, step_s in steps])
    work = [tile_work(tiles, plan.bucket, [(c.start, len(c.tokens)) for c in plan.chunks]) for plan, _ in steps]
    bases = [[plan.bucket == bucket for bucket in buckets] for plan, _ in steps]
    terms = _least_errors(np.hstack((np.array(bases, float), np.array(work, float))), seconds)
    fastest = [min(step_s for plan, step_s in steps if plan.bucket == bucket) for bucket in buckets]
    base_s = accumulate(
        (max(float(term), LEAST_SHARE * least) for term, least in zip(terms, fastest, strict=False)), max
    )
    per_tile_s, per_row_s, per_pair_s = (float(term) for term in terms[len(buckets) :])
    return TiledPrice(tiles, tuple(buckets), tuple(base_s), per_tile_s, per_row_s, per_pair_s)


def _least_errors(
    work: Float[np.ndarray, "steps terms"], seconds: Float[np.ndarray, "steps"]
) -> Float[np.ndarray, "terms"]:
    """Prices of terms, none below 0, by least squares whose weights fall with the error of the turn before."""
    weights, terms = 1.0 / seconds, np.arange(work.shape[1])
    prices = np.zeros(work.shape[1])
    for _ in range(TURNS):
        solved = np.linalg.lstsq(work[:, terms] * weights[:, None], seconds * weights, rcond=None)[0]
        prices = np.zeros(work.shape[1])
        prices[terms] = solved
        errors = np.abs(work @ prices / seconds - 1.0)
        weights = 1.0 / seconds / np.sqrt(np.maximum(errors, NEAR))
        terms = terms[solved >= 0]
    return np.maximum(prices, 0.0)
