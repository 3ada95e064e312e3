"""Teaches JAX's interpreter of Mosaic kernels (0.11.2) Hopper's wgmma as the hardware has it.

A product is asynchronous: between its issue and a wait its accumulator holds NaN, its operands are read at the end, and the
race detector knows that they are being read until then, through the asynchronous proxy as by TMA. Its first operand may be in
registers, and accumulators can be stored to. The axes of a matrix in shared memory can be folded before it is loaded or stored
to. Knows private names of JAX, and no kernel.
"""

from collections import defaultdict, deque
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey as Key
from jax._src.state import AbstractRef
from jax._src.state.types import ReshapeTransform, TransformedRef


class Operand(NamedTuple):
    """A matrix in shared memory, or in registers if it has a value."""

    key: Any
    access: Any
    value: np.ndarray | None

    def read(self, shared_memory, thread) -> np.ndarray:
        if self.value is not None:
            return self.value
        content, _, _ = shared_memory.get_buffer_content(self.key, self.access, thread)
        return content


class Product(NamedTuple):
    """A product under way, and the clock of its reads."""

    accumulator: Key
    left: Operand
    right: Operand
    clock: Any


class Products:
    """The products that a thread has under way, oldest first, and what their accumulators really hold."""

    def __init__(self) -> None:
        self.pending: deque[Product] = deque()
        self.sums: dict[Key, np.ndarray] = {}


class Interpreter(jaxpr_interpret.JaxprInterpreter):
    """The interpreter of a thread's program."""

    def interpret(self, jaxpr, token, *args):
        """As the base class, which passes the token on to the calls that it takes for code of the compiler."""
        others = primitives.wgmma_accumulator_store_p, primitives.wgmma_wait_p
        changed = [equation.primitive in others for equation in jaxpr.eqns]
        equations = [
            equation.replace(primitive=primitives.inline_mgpu_p) if is_other else equation
            for equation, is_other in zip(jaxpr.eqns, changed, strict=True)
        ]
        return super().interpret(jaxpr.replace(eqns=equations) if any(changed) else jaxpr, token, *args)

    def _interpret_inline_mgpu_p(self, eqn, token, get_invals):
        if not eqn.outvars:
            wait = partial(_wait, wait_n=eqn.params["n"])
            return self._call(wait, eqn, gpu_callbacks.TOKEN_SHAPE_DTYPE, token), []
        accumulator, value = get_invals()
        called = self._call(_store, eqn, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, accumulator=accumulator, value=value)
        return called, [value]

    def _interpret_get_p(self, eqn, token, get_invals):
        return self._folded(super()._interpret_get_p, gpu_callbacks.call_get, eqn, token, get_invals)

    def _interpret_swap_p(self, eqn, token, get_invals):
        call = partial(gpu_callbacks.call_swap, mask=None)
        return self._folded(super()._interpret_swap_p, call, eqn, token, get_invals)

    def _folded(self, plain, call, eqn, token, get_invals):
        """A load or a swap of the first rows of a folded matrix, as one of the whole: the rows behind become NaN in a swap."""
        ref, *others = get_invals()
        leaves = others[len(others) - eqn.params["tree"].num_leaves :]
        transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
        places = [place for place, each in enumerate(transforms) if isinstance(each, ReshapeTransform)]
        if not places:
            return plain(eqn, token, get_invals)
        before, shape = transforms[: places[0]], transforms[places[0]].shape
        whole: Any = TransformedRef(eqn.invars[0].aval, before).type
        num_rows, values = eqn.outvars[0].aval.shape[0], {}
        if len(leaves) < len(others):
            missing = ((0, shape[0] - num_rows), (0, 0))
            values["val"] = jnp.pad(others[0], missing, constant_values=jnp.nan).reshape(whole.shape)
        token, content = call(
            token=token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(whole.shape, whole.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=ref,
            transforms=before,
            source_info=eqn.source_info,
            **values,
        )
        return token, content.reshape(shape)[:num_rows]

    def _interpret_wgmma_ref_p(self, eqn, token, get_invals):
        accumulator, left, right, *leaves = get_invals()
        trees = (eqn.params[f"{name}_transforms_tree"] or jax.tree.structure([]) for name in ("acc", "a", "b"))
        transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
        in_registers = not isinstance(eqn.invars[1].aval, AbstractRef)
        issue = partial(_issue, in_registers=in_registers)
        operands = {"accumulator": accumulator, "left": left, "right": right, "transforms": transforms}
        return self._call(issue, eqn, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, **operands), []

    def _interpret_wgmma_accumulator_deref_p(self, eqn, token, get_invals):
        (accumulator,) = get_invals()
        load = partial(_load, wait_n=eqn.params["wait_n"])
        results = gpu_callbacks.TOKEN_SHAPE_DTYPE, eqn.outvars[0].aval
        return self._call(load, eqn, results, token, accumulator=accumulator)

    def _call(self, function, eqn, results, token, **arguments):
        function = gpu_callbacks.fail_on_exception(partial(function, source_info=eqn.source_info))
        return callback.io_callback(function, results, token=token, thread=self.thread, **arguments)


def install() -> None:
    """Interpret all kernels of this process so."""
    jaxpr_interpret.JaxprInterpreter = Interpreter


def raced() -> bool:
    """Whether threads of the last kernel raced."""
    return gpu_callbacks.get_races().races_found


def _products(shared_memory, thread) -> Products:
    """The products of a thread of the kernel that owns this memory."""
    return vars(shared_memory).setdefault("products", defaultdict(Products))[thread]


def _issue(*, token, thread, accumulator, left, right, transforms, in_registers, source_info):
    shared_memory = gpu_callbacks._get_shared_memory()
    clock = None
    if shared_memory.detect_races:
        clock = shared_memory.incr_clock(thread)
        clock.inc(shared_memory.get_next_tma_thread_id())

    def operand(key, transforms):
        key, transforms = Key.from_array(key), jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        access = shared_memory.access(key, transforms)
        if clock is not None:
            gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock.copy(), key, access, source_info)
        return Operand(key, access, None)

    a = Operand(None, None, np.asarray(left)) if in_registers else operand(left, transforms[1])
    products, key = _products(shared_memory, thread), Key.from_array(accumulator)
    everything = shared_memory.access(key, ())
    if key not in products.sums:
        sums, _, _ = shared_memory.get_buffer_content(key, everything, thread)
        assert sums is not None
        products.sums[key] = sums
    products.pending.append(Product(key, a, operand(right, transforms[2]), clock))
    shared_memory.store_buffer_content(key, everything, np.full_like(products.sums[key], np.nan), thread)
    return token


def _load(*, token, thread, accumulator, wait_n, source_info):
    if wait_n is not None:
        _wait(token=token, thread=thread, wait_n=wait_n, source_info=source_info)
    shared_memory, key = gpu_callbacks._get_shared_memory(), Key.from_array(accumulator)
    content, _, _ = shared_memory.get_buffer_content(key, shared_memory.access(key, ()), thread)
    return token, content


def _wait(*, token, thread, wait_n, source_info):
    del source_info
    shared_memory = gpu_callbacks._get_shared_memory()
    products = _products(shared_memory, thread)
    while len(products.pending) > wait_n:
        _finish(shared_memory, thread, products)
    return token


def _finish(shared_memory, thread, products: Products) -> None:
    """End the oldest product, and order its reads before what the thread does from now on."""
    product = products.pending.popleft()
    left, right = (side.read(shared_memory, thread) for side in (product.left, product.right))
    if product.accumulator not in shared_memory.mem:
        raise ValueError("nothing waited for a product before its accumulator went")
    sums = products.sums[product.accumulator]
    with np.errstate(invalid="ignore"):  # of NaN
        products.sums[product.accumulator] = sums + np.matmul(left, right, dtype=sums.dtype)
    if product.clock is not None:
        with shared_memory.lock:
            shared_memory.clocks[thread].update(product.clock)
    if all(other.accumulator != product.accumulator for other in products.pending):
        sums, key = products.sums.pop(product.accumulator), product.accumulator
        shared_memory.store_buffer_content(key, shared_memory.access(key, ()), sums, thread)


def _store(*, token, thread, accumulator, value, source_info):
    del source_info
    shared_memory = gpu_callbacks._get_shared_memory()
    key = Key.from_array(accumulator)
    if key in _products(shared_memory, thread).sums:
        raise ValueError("a product adds to the accumulator that is stored to")
    shared_memory.store_buffer_content(key, shared_memory.access(key, ()), np.asarray(value), thread)
    return token
