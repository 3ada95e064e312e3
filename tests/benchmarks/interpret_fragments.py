"""Run as a program: products with weights in wgmma's order, interpreted, against the weight's numbers, for cases that are read.

A process of its own, as `tests/pallas/interpret_mosaic.py` says. Reads `{"cases": [[tokens, inputs, outputs, kind, grouped],
…], "dropped_wait": …}` from standard input and writes, of every case, its largest difference as a share of the largest number
and whether threads raced. `dropped_wait` is the number of a wait that the kernel is run without, or null. Code for the GPU
alone renames registers, see `fragments`: its model here has the order that PTX gives wgmma's first operand.
"""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

os.environ["NPROC"] = "16"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.gpu_suite import fragment_product
from tests.support import wgmma_interpreter
from tests.support.dropped_waits import without_wait


def fragments(*pairs: jax.Array) -> jax.Array:
    """Words that threads have, by columns eight and inputs eight further, as a matrix."""
    by_place = jnp.stack(pairs).reshape(2, 2, 4, 8, 4, 4)  # upper inputs, upper columns, warp, lane, lane, product
    numbers = jax.lax.bitcast_convert_type(by_place, jnp.bfloat16)  # two neighbouring inputs
    return numbers.transpose(2, 1, 3, 5, 0, 4, 6).reshape(64, 64)


def result(tokens: int, inputs: int, outputs: int, kind: str, grouped: bool) -> tuple[float, bool]:
    """The largest difference of a product, and whether threads raced."""
    rng = np.random.default_rng(tokens)
    bits = rng.integers(-128, 128, (inputs, outputs), np.int8)
    numbers = bits >> 4 if kind == "int4" else bits.view(kind)
    if kind == "float8_e4m3fn":  # NaN; and a CPU takes what is below bfloat16's normal numbers for 0
        numbers = np.where(np.abs(numbers.astype(np.float32)) >= 2**-6, numbers, np.zeros_like(numbers))
    scales = jnp.asarray(
        rng.standard_normal((inputs // fragment_product.DEPTH if grouped else 1, outputs)), jnp.float16
    )
    scales = scales.at[0, 1].set(0)
    x = jnp.asarray(rng.standard_normal((tokens, inputs)), jnp.bfloat16)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    weight = fragment_product.arrange(jnp.asarray(numbers, kind), scales)
    y = fragment_product.product(x, weight, kind=kind, out=jnp.float32, interpret=interpret)
    wide = numbers.astype(np.float64) * np.repeat(np.asarray(scales, np.float64), inputs // len(scales), 0)
    expected = np.asarray(x, np.float64) @ wide
    return float(np.abs(np.asarray(y) - expected).max() / np.abs(expected).max()), wgmma_interpreter.raced()


def main() -> None:
    order = json.load(sys.stdin)
    if order["dropped_wait"] is not None:
        source = Path(fragment_product.__file__).read_text()
        exec(without_wait(source, order["dropped_wait"]), fragment_product.__dict__)
    fragment_product.fragments = fragments
    wgmma_interpreter.install()
    with redirect_stdout(sys.stderr):
        results = [result(*case) for case in order["cases"]]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
