"""The Mosaic kernel against the reference, interpreted, with wgmma and TMA; `tests/aot` compiles it for Hopper."""

import json
import os
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.prepared_batch import prepare
from jinfercept.pallas import mosaic_attention
from jinfercept.pallas.gpu_kernels import mosaic_cut, paged_attention_mosaic
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.pallas.tiles import HOPPER, Heads, tiles_for
from jinfercept.pallas.triton_attention import paged_attention_triton
from tests.support.attention_steps import Shapes, make_step
from tests.support.dropped_waits import waits

HERE = Path(__file__).parent
KERNEL = Path(mosaic_attention.__file__).read_text()
GROUPED = Shapes(60, 4, 6, 64, 3, 1, 128)  # a group that leaves rows of a tile empty
ONE_TILE = Shapes(42, 1, 6, 64, 3, 1, 128)
Rows = list[tuple[int, int]]
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-10}  # of weights and result


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def interpret(
    shapes: Shapes, dtype: str, steps: list[tuple[int, Rows]], dropped_wait: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the kernel, without one of its waits or with all.

    Args:
        steps: decode rows, and all rows' query and context tokens.
    """
    body = {"dtype": dtype, "shapes": shapes, "steps": steps, "dropped_wait": dropped_wait}
    return subprocess.run(
        [sys.executable, HERE / "interpret_mosaic.py"],
        input=json.dumps(body),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def check(shapes: Shapes, dtype: str, steps: list[tuple[int, Rows]]) -> None:
    """The kernel agrees with the reference, and no threads race."""
    done = interpret(shapes, dtype, steps)
    assert done.returncode == 0, done.stderr[-4000:]
    for difference, raced in json.loads(done.stdout):
        assert difference < ROUNDING[dtype]
        assert not raced, done.stderr[-4000:]


def test_mosaic_attention_agrees_with_the_reference_without_races() -> None:
    steps: list[tuple[int, Rows]] = [
        # decoding, an empty row, less than a tile before another row, whose two tiles have more steps than buffers
        (1, [(1, 33), (0, 5), (5, 70), (44, 330)]),
    ]
    check(GROUPED, "bfloat16", steps)


def test_warpgroups_ask_for_no_more_registers_than_a_block_starts_with() -> None:
    threads = 128 * (mosaic_attention.COMPUTING + 1)
    at_start = 65_536 // threads // 8 * 8  # of a thread, in steps of 8: more waits for ever
    registers = mosaic_attention.COMPUTING * mosaic_attention.COMPUTE_REGISTERS + mosaic_attention.FETCH_REGISTERS
    assert registers <= at_start * threads // 128


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mosaic_attention_agrees_at_the_borders_of_steps() -> None:
    check(GROUPED, "bfloat16", [(0, [(2, 128), (3, 129), (20, 20)]), (0, [])])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(len(waits(KERNEL))), ids=waits(KERNEL))
def test_a_kernel_that_does_not_wait_is_caught(number: int) -> None:
    done = interpret(ONE_TILE, "bfloat16", [(0, [(42, 330)])], dropped_wait=number)
    if done.returncode == 0:
        [(difference, raced)] = json.loads(done.stdout)
        assert raced or not difference < ROUNDING["bfloat16"]
    else:  # a race; or a barrier, a copy or a product whose end a thread did not wait for
        assert re.search("RACE DETECTED|observed|Not all .* completed|adds to|waited for", done.stderr), done.stderr[
            -4000:
        ]


def random_step(shapes: Shapes, seed: int) -> tuple[int, Rows]:
    rng = random.Random(seed)
    num_decode, rows, left = rng.randint(0, 2), [], shapes.num_tokens
    most = shapes.pages_per_row * shapes.page_size
    for number in range(rng.randint(num_decode, shapes.num_rows)):
        length = 1 if number < num_decode else rng.randint(0, min(left, most))
        border = rng.choice([shapes.page_size, 128, most]) + rng.randint(-1, 1)
        rows.append((length, min(most, max(length, 1, rng.choice([border, rng.randint(1, most)])))))
        left -= length
    return num_decode, rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("heads", "page_size", "head_dim", "dtype"),
    [
        ((2, 2), 16, 128, "bfloat16"),
        ((6, 2), 48, 64, "float16"),
        ((8, 1), 128, 64, "bfloat16"),
        ((6, 2), 8, 128, "float16"),
        ((5, 1), 16, 64, "bfloat16"),
        ((24, 1), 128, 128, "float16"),
    ],
)
def test_every_group_page_size_head_dim_and_type(heads, page_size, head_dim, dtype) -> None:
    shapes = Shapes(140, 4, -(-700 // page_size), page_size, heads[0], heads[1], head_dim)
    steps = [random_step(shapes, seed) for seed in range(5)]
    check(shapes, dtype, steps)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "heads"),
    [("float32", 64, 16, 1), ("bfloat16", 256, 16, 1), ("bfloat16", 64, 20, 1), ("bfloat16", 64, 16, 71)],
)
def test_what_the_mosaic_attention_has_not_is_refused(dtype: str, head_dim: int, page_size: int, heads: int) -> None:
    shapes = Shapes(1, 1, 1, page_size, heads, 1, head_dim)
    q, pages, batch = make_step(shapes, 1, [(1, 1)], seed=7, dtype=jnp.dtype(dtype))
    got = f"got queries in {dtype}, pages of {page_size} tokens .* head dim {head_dim}, {heads} query heads"
    with pytest.raises(ValueError, match=got):
        paged_attention_mosaic(q, pages, batch, interpret=True)


def test_a_scored_layer_takes_the_chunks_of_triton() -> None:
    q, pages, batch = make_step(GROUPED, 1, [(1, 33), (0, 5), (44, 330)], 1, dtype=jnp.bfloat16)
    heads = Heads(GROUPED.num_heads, GROUPED.num_kv_heads, GROUPED.head_dim, 2)
    batch = prepare(batch, mosaic_cut(heads, interpret=True))
    tiles = tiles_for(heads, HOPPER)
    tiles = tiles._replace(chunk=tiles.chunk._replace(rows=mosaic_attention.ROWS, num_warps=8))
    options = {"scoring": Scoring(100, 5.0, jnp.linspace(-1, 3, GROUPED.num_heads)), "interpret": True}
    got = jax.make_jaxpr(partial(paged_attention_mosaic, **options))(q, pages, batch)
    want = jax.make_jaxpr(partial(paged_attention_triton, tiles=tiles, **options))(q, pages, batch)
    assert str(got) == str(want)


def test_nobody_imports_the_backend_who_does_not_ask_for_it() -> None:
    code = "import sys, jinfercept.models.attention; sys.exit('jinfercept.pallas.mosaic_attention' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0
