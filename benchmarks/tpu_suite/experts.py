"""What products with the weights of experts reach on a TPU: jax's grouped kernel (`gmm`) with our tiles and with others, beside
XLA's `ragged_dot`; the rows are those of `expert_timing`. On a CPU Pallas interprets the kernel. No TPU has run it.
"""

from collections.abc import Iterator
from functools import partial

import jax

from benchmarks.suite.expert_timing import Candidate, expert_rows
from benchmarks.suite.sizes import ExpertsCase, Row, Sizes
from jinfercept.pallas.tpu_grouped import MOST_TILE, product

OTHER_TILES = ((128, 1024, 512), (128, 2048, 1024), (64, 2048, 512))
"""Most rows, inputs and outputs of a tile, beside ours."""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases."""
    return expert_rows(sizes, _candidates)


def _candidates(_: ExpertsCase, stack: jax.Array) -> dict[str, Candidate]:
    interpret = jax.default_backend() != "tpu"
    others = {} if interpret else {f"gmm {' x '.join(map(str, tile))}": tile for tile in OTHER_TILES}
    return {
        name: Candidate(stack, jax.jit(partial(product, most=tile, interpret=interpret)))
        for name, tile in {"gmm": MOST_TILE, **others}.items()
    }
