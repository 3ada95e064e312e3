"""Run as a program: the Mosaic kernel in interpret mode against the reference, for the steps that standard input names.

A process of its own because the interpreter's threads wait for each other inside XLA's pool of threads, which has to be larger
than the few cores of a small machine make it, and is made once. Reads `{"dtype": …, "shapes": […], "steps": [[num_decode,
[[query tokens, context tokens], …]], …]}` and writes every step's largest difference, over 1 + what it should be.
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

from jinfercept.pallas.attention import prepare
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.mosaic_attention import mosaic_cut, paged_attention_mosaic
from tests.support.attention_steps import Shapes, make_step, reference


def main() -> None:
    asked = json.load(sys.stdin)
    dtype, shapes = jnp.dtype(asked["dtype"]), Shapes(*asked["shapes"])
    interpreted = jax.jit(partial(paged_attention_mosaic, interpret=True))
    differences = []
    with redirect_stdout(sys.stderr):
        for seed, (num_decode, rows) in enumerate(asked["steps"]):
            q, pages, batch = make_step(shapes, num_decode, rows, seed, dtype)
            heads = Heads(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, dtype.itemsize)
            batch = prepare(batch, mosaic_cut(heads, interpret=True))
            out, want = (attend(q, pages, batch).astype(jnp.float32) for attend in (interpreted, reference))
            differences.append(float((jnp.abs(out - want) / (1 + jnp.abs(want))).max()))
    json.dump(differences, sys.stdout)


if __name__ == "__main__":
    main()
