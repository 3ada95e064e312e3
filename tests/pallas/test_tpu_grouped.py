"""Products of experts on TPUs: jax's kernel, interpreted on a CPU. No TPU runs here."""

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.pallas.tpu_grouped import product, tile_of, tpu_grouped_product


def test_rows_are_multiplied_with_the_matrix_of_their_expert():
    rows = jax.random.normal(jax.random.key(0), (20, 128), jnp.bfloat16)
    stack = jax.random.normal(jax.random.key(1), (4, 128, 256), jnp.bfloat16)
    sizes = jnp.array([3, 0, 10, 4])
    got = product(rows, stack, sizes, interpret=True)
    want = jnp.concatenate([rows[:3] @ stack[0], rows[3:13] @ stack[2], rows[13:17] @ stack[3]])
    assert got.shape == (20, 256)
    np.testing.assert_allclose(got[:17].astype(np.float32), want.astype(np.float32), atol=0.1, rtol=2**-6)


def test_tiles_are_no_larger_than_what_is_multiplied():
    assert tile_of(8, 128, 256) == (16, 128, 256)
    assert tile_of(4096, 4096, 1536) == (128, 2048, 512)


def test_a_cpu_has_its_own_product():
    assert tpu_grouped_product(jnp.ones(2, jnp.int32), jnp.bfloat16, [(2, 128, 128)]) is None
