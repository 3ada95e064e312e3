"""Run as a program: the Mosaic kernel in interpret mode against the reference, for the steps that standard input names.

A process of its own because the interpreter's threads wait for each other inside XLA's pool of threads, which has to be larger
than the few cores of a small machine make it, and is made once. Reads `{"dtype": …, "shapes": […], "steps": [[num_decode,
[[query tokens, context tokens], …]], …], "dropped_wait": …}` and writes of every step its largest difference, over 1 + what it
should be, and whether threads raced. Everything in shared memory and in pages that was not written is NaN. `dropped_wait`
is the number of a wait that the kernel is run without, or null.
"""

import json
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

os.environ["NPROC"] = "16"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.prepared_batch import prepare
from jinfercept.pallas import mosaic_attention
from jinfercept.pallas.gpu_kernels import mosaic_cut, paged_attention_mosaic
from jinfercept.pallas.tiles import Heads
from tests.support import wgmma_interpreter
from tests.support.attention_steps import Shapes, make_step, reference
from tests.support.dropped_waits import without_wait


def drop_wait(number: int) -> None:
    """Leave a wait out of the kernel, before it is imported."""
    exec(without_wait(Path(mosaic_attention.__file__).read_text(), number), mosaic_attention.__dict__)


def main() -> None:
    order = json.load(sys.stdin)
    if order["dropped_wait"] is not None:
        drop_wait(order["dropped_wait"])
    dtype, shapes = jnp.dtype(order["dtype"]), Shapes(*order["shapes"])
    wgmma_interpreter.install()
    interpreted = jax.jit(partial(paged_attention_mosaic, interpret=True))
    results = []
    with redirect_stdout(sys.stderr):
        for seed, (num_decode, rows) in enumerate(order["steps"]):
            q, pages, batch = make_step(shapes, num_decode, rows, seed, dtype)
            heads = Heads(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, dtype.itemsize)
            batch = prepare(batch, mosaic_cut(heads, interpret=True))
            out, want = (np.asarray(attend(q, pages, batch), np.float32) for attend in (interpreted, reference))
            difference = np.max(np.abs(out - want) / (1 + np.abs(want)))  # NaN if anything is: XLA's maximum drops it
            results.append((float(difference), wgmma_interpreter.raced()))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
