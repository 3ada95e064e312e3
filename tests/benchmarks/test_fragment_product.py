"""Products of the GPU suite with weights in the order of wgmma's first operand: their values, and that order."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT

from benchmarks.gpu_suite import fragment_product
from tests.support.dropped_waits import waits

PROGRAM = Path(__file__).parent / "interpret_fragments.py"
KERNEL = Path(fragment_product.__file__).read_text()
Case = tuple[int, int, int, str, bool]


def interpret(cases: Sequence[Case], dropped_wait: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the kernel, without one of its waits or with all."""
    order = json.dumps({"cases": cases, "dropped_wait": dropped_wait})
    return subprocess.run([sys.executable, PROGRAM], input=order, capture_output=True, text=True, check=False)


def test_products_are_those_of_the_numbers_without_races() -> None:
    cases = [
        (3, 896, 128, "int4", True),  # tokens that fill no tile, and inputs in parts of different sizes
        (20, 640, 256, "int8", False),
        (70, 3072, 128, "float8_e4m3fn", True),  # two tiles of tokens, and more steps than buffers
    ]
    done = interpret(cases)
    assert done.returncode == 0, done.stderr[-4000:]
    for difference, raced in json.loads(done.stdout):
        assert difference < 1e-6
        assert not raced


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(waits(KERNEL))), ids=waits(KERNEL))
def test_a_product_that_does_not_wait_is_caught(number: int) -> None:
    done = interpret([(40, 4096, 128, "int4", True)], dropped_wait=number)
    if done.returncode == 0:
        [(difference, raced)] = json.loads(done.stdout)
        assert raced or not difference < 1e-6
    else:  # a race; a barrier or a copy whose end no thread waited for; or memory that went before a product had ended
        caught = "RACE DETECTED|observed|Not all .* completed|adds to|waited for|KeyError: HostAllocationKey"
        assert re.search(caught, done.stderr), done.stderr[-4000:]


@pytest.mark.parametrize("column", [0, 7, 8, 21, 63])
def test_registers_of_the_compiler_have_the_order_of_the_words(column: int) -> None:
    for depth in range(64):
        place = WGMMA_LAYOUT.tiling.tile_indices((column, depth))
        warp, lane, pair = place[-7], 4 * place[-3] + place[-2], place[-1]
        product, upper_depth, lower = depth // 16, depth // 8 % 2, depth % 8
        assert (warp, lane, pair) == (column // 16, 4 * (column % 8) + lower // 2, lower % 2)
        shape = WGMMA_LAYOUT.registers_shape((64, 64))
        register = np.ravel_multi_index([at if size > 1 else 0 for at, size in zip(place, shape, strict=True)], shape)
        assert register == 4 * product + 2 * upper_depth + column // 8 % 2
