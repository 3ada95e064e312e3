"""What a model does where several devices compute it: partial sums are added, a vocabulary that is cut is put together.

A model is traced once for all devices under `jax.shard_map`, with each device's part of the weights (`sharding.py`). On one
device every function here is the plain operation that it stands for, and leaves no trace in the executable.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jinfercept.models.quantized import QuantizedTensor

AXIS = "tp"
"""Name of the mesh axis along which weights and pages are cut."""


def num_devices() -> int:
    """Devices that compute the model which is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in mesh.manual_axes else 1


def add_partial_sums(x: Float[Array, "T E"], *partial_sums: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Add to `x`, which is the same on all devices, the sum over devices of the partial sums, in one exchange. Products that
    sum over a cut axis, such as heads or the feed-forward's inner one, are partial sums."""
    if num_devices() == 1:
        return sum(partial_sums, start=x)
    first, *rest = partial_sums
    return x + sum_of_devices(sum(rest, start=first))


def sum_of_devices[X: Array](x: X) -> X:
    """The sum of the devices' arrays."""
    return x if num_devices() == 1 else jax.lax.psum(x, AXIS)


def on_first_device[X: Array](x: X) -> X:
    """`x` on the first device and zeros on the others: a term, such as a bias, that partial sums have once."""
    if num_devices() == 1:
        return x
    return jnp.where(jax.lax.axis_index(AXIS) == 0, x, jnp.zeros_like(x))  # pyright: ignore[reportReturnType]


def look_up(table: Shaped[Array, "V E"] | QuantizedTensor, tokens: Int[Array, "T"]) -> Shaped[Array, "T E"]:
    """The rows of a table whose rows are cut among devices."""

    def rows(index: Int[Array, "T"]) -> Shaped[Array, "T E"]:
        return table.rows(index) if isinstance(table, QuantizedTensor) else table[index]

    if num_devices() == 1:
        return rows(tokens)
    local = tokens - jax.lax.axis_index(AXIS) * len(table)
    is_here = (local >= 0) & (local < len(table))
    local_rows = rows(jnp.where(is_here, local, 0))
    return jax.lax.psum(jnp.where(is_here[:, None], local_rows, jnp.zeros_like(local_rows)), AXIS)


def gather_columns(logits: Float[Array, "R V"], num_columns: int) -> Float[Array, "R columns"]:
    """Put together the columns of all devices; the last device's may be padded beyond `num_columns`."""
    if num_devices() == 1:
        return logits
    return jax.lax.all_gather(logits, AXIS, axis=1, tiled=True)[:, :num_columns]
