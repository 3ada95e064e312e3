"""Kernels compiled for a CPU with AVX2 and nothing newer, on any x86 CPU: they call only functions that every process has."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jinfercept.cpu_kernels import native
from tests.support.attention_steps import Shapes, make_step
from tests.support.quantized_weight import weight

pytestmark = pytest.mark.skipif(not native.usable(), reason="kernels need llvmlite and an x86 CPU with AVX2")
EXISTING = {"sched_yield", "syscall", "memset", "memcpy", "memmove"}
OWN = {"item", "work", "pool"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that are traced, none of them compiled for this CPU."""
    traced: list[Any] = []
    monkeypatch.setattr(native, "features", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(native, "target", lambda kernel: traced.append(kernel) or "not called")
    return traced


def called(kernel: Any) -> set[str]:
    """Names of functions and variables that a kernel's machine code refers to."""
    import llvmlite.binding as llvm

    from jinfercept.cpu_kernels.threads import handler

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu="x86-64-v3", opt=3, jit=True)
    text = machine.emit_assembly(llvm.parse_assembly(str(handler("kernel", kernel))))
    return set(re.findall(r"(?:call\w*|movabs\w*|jmp)\s+\$?([A-Za-z_]\w+)", text)) - OWN


def test_products_and_attention_call_no_function_of_a_compilers_library(kernels: list[Any]):
    from jinfercept.cpu_kernels import chunks, decode, dense_product, grouped_product
    from jinfercept.models import quantized_product

    def products(x: jax.Array, w: jax.Array, tied: jax.Array) -> list[jax.Array]:
        return [
            dense_product.product(rows, matrix, transposed=transposed, out="bfloat16")
            for rows in (x[:2], x)
            for matrix, transposed in ((w, False), (tied, True))
        ]

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    jax.eval_shape(products, shape(32, 64), shape(64, 96), shape(96, 64))
    for bits in (4, 8):
        packed, _ = weight(64, 96, bits=bits, group=32, offset=True)
        for rows in (1, 40):
            jax.eval_shape(lambda x, packed=packed: quantized_product.product(x, packed, jnp.bfloat16), shape(rows, 64))
    numbers = jax.ShapeDtypeStruct((5,), jnp.int32)
    stack = jax.ShapeDtypeStruct((5, 64, 64), jnp.bfloat16)
    jax.eval_shape(grouped_product.product, shape(3, 64), stack, numbers, numbers, numbers)
    q, pages, batch = make_step(
        Shapes(140, 11, 14, 16, 9, 3, 32), 2, [(1, 7), (1, 20), (40, 100)], 4, dtype=jnp.bfloat16
    )
    answer = jax.eval_shape(decode.decode_attention, q, pages, batch, batch.num_decode)
    if chunks.supports(q, pages):
        jax.eval_shape(chunks.chunk_attention, q, pages, batch, answer)
    different = {repr(kernel): kernel for kernel in kernels}
    assert len(different) >= 8, sorted(different)
    unknown = {name: called(kernel) - EXISTING for name, kernel in different.items()}
    assert not any(unknown.values()), unknown
