"""The GPU's kernel for products of few rows, interpreted, against float64; and which of a model's products take it."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jinfercept.models.blocks import project
from jinfercept.pallas import triton_product
from jinfercept.pallas.skinny_products import skinny_products

GPU = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
H100 = jax.sharding.AbstractMesh((1,), ("tp",), abstract_device=GPU)


@pytest.mark.parametrize(("rows", "inputs", "outputs", "out"), [(3, 256, 96, jnp.float32), (33, 256, 64, jnp.bfloat16)])
def test_the_kernel_multiplies_few_rows(rows: int, inputs: int, outputs: int, out: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((inputs, outputs)), jnp.bfloat16)
    assert triton_product.supports(x, weight)
    y = triton_product.product(x, weight, out, interpret=True)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    error = 1e-5 if out == jnp.float32 else 4e-3
    assert y.dtype == out
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype"),
    [
        (65, 4096, 4096, jnp.bfloat16),
        (1, 4096, 28_672, jnp.bfloat16),  # 224 MiB
        (1, 576, 576, jnp.bfloat16),  # no tile fills 576 inputs
        (1, 4096, 100, jnp.bfloat16),
        (1, 4096, 4096, jnp.float32),
    ],
)
def test_the_kernel_leaves_other_products_to_xla(rows: int, inputs: int, outputs: int, dtype: jnp.dtype) -> None:
    x, weight = (jax.ShapeDtypeStruct(dims, dtype) for dims in ((rows, inputs), (inputs, outputs)))
    assert not triton_product.supports(x, weight)


@pytest.mark.parametrize(
    ("spec", "x", "weight", "supported"),
    [
        ("te,ekgd->tkgd", (8, 4096), (4096, 8, 6, 128), True),
        ("thd,hde->te", (64, 32, 128), (32, 128, 4096), True),
        ("tf,fe->te", (1, 14_336), (14_336, 4096), True),
        ("re,ve->rv", (1, 4096), (8192, 4096), False),  # the weight's rows are its outputs
        ("te,ef->tf", (65, 4096), (4096, 4096), False),
    ],
)
@pytest.mark.parametrize("chosen", [True, False])
def test_a_models_products_of_few_rows_take_the_kernel_where_it_is_chosen(
    spec: str, x: tuple[int, ...], weight: tuple[int, ...], *, supported: bool, chosen: bool
) -> None:
    arrays = [jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in (x, weight)]
    with jax.sharding.use_abstract_mesh(H100), skinny_products() if chosen else nullcontext():
        program = str(jax.make_jaxpr(lambda x, weight: project(spec, x, nnx.Param(weight)))(*arrays))
    assert (f"name={triton_product.NAME}" in program) == (chosen and supported)
