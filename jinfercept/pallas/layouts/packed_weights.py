"""Weights of 4 or 8 bits as they lie, and stacks of experts' gated matrices for TPUs.

Packed weights are numbers in blocks of columns, with a scale for each group of inputs of a column.

A weight `[K, N]` is `scale * (q - zero) + offset`; scale and offset belong to `group` neighbours along K. In MXFP4 (OCP's
Microscaling Formats) numbers of 4 bits are floating-point, e2m1, and scales are powers of two, of which the exponent is stored
as uint8. A block is contiguous, so that a kernel that computes its columns reads memory in sequence.
"""

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Integer, Shaped

WIDTH = 32
"""Columns of a block."""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Inputs of a word's numbers of 4 bits, from the lowest: a shift brings two neighbours to the same place of both halves."""
E2M1 = (0.5, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of MXFP4 by their three lowest bits as they lie here; the fourth is the sign. The first two have changed places
(`from_e2m1`): so all but 0 have the exponent and the mantissa of a normal number, whose exponent is one less."""
DOUBLED_E2M1 = np.uint32(sum(int(2 * number) << 4 * bits for bits, number in enumerate(E2M1)))
"""Twice these numbers, in 4 bits each."""


class Packed(NamedTuple):
    """A weight's arrays; `W` is `WIDTH`.

    Attributes:
        values: int8 or float8_e4m3fn `[N / W, K, W]`; or uint32 `[N / W, K / 8, W]`: words of eight neighbouring inputs of a
            column, 4 bits each, in the order `ORDER`.
        scales: `[N / W, K / group, W]`; of type uint8 in MXFP4, see `wide_scales`.
        offsets: as scales; None: no offsets.
        zero: subtracted from the numbers.
    """

    values: Shaped[Array, "B R W"]
    scales: Shaped[Array, "B G W"]
    offsets: Float[Array, "B G W"] | None = None
    zero: int = 0


def from_e2m1[A: np.ndarray](bits: A) -> A:
    """Turn 4-bit numbers of MXFP4 into those that are stored, see `E2M1`."""
    return bits ^ ((bits & 6) == 0)  # pyright: ignore[reportReturnType]


def blocks(columns: Shaped[Array, "R N"]) -> Shaped[Array, "B R W"]:
    """A matrix in blocks of columns."""
    return jnp.moveaxis(columns.reshape(len(columns), -1, WIDTH), 1, 0)


def unblocked(columns: Shaped[Array, "B R W"]) -> Shaped[Array, "R N"]:
    """The inverse of `blocks`."""
    return jnp.moveaxis(columns, 0, 1).reshape(columns.shape[1], -1)


def unpack(packed: Packed, dtype: DTypeLike) -> Float[Array, "K N"]:
    """The weight's numbers, computed in float32."""
    return unblocked(unpack_blocks(packed, dtype))


def unpack_blocks(packed: Packed, dtype: DTypeLike) -> Float[Array, "B K W"]:
    """The weight's numbers in blocks of columns, which may have any width."""
    values, scales, offsets, zero = packed
    if values.dtype == jnp.uint32:
        shifts = jnp.asarray([4 * ORDER.index(row) for row in range(len(ORDER))], jnp.uint32)
        values = (values[:, :, None] >> shifts[None, None, :, None] & 15).astype(jnp.int32)
    by_group = wide_numbers(values.reshape(*scales.shape[:2], -1, scales.shape[2]), zero, scales.dtype)
    wide = by_group * wide_scales(scales)[:, :, None]
    if offsets is not None:
        wide += offsets[:, :, None].astype(jnp.float32)
    return wide.astype(dtype).reshape(len(values), -1, scales.shape[2])


def wide_numbers(q: Shaped[Array, "..."], zero: int, scales: DTypeLike) -> Float32[Array, "..."]:
    """Stored numbers without their zero; numbers with scales of type uint8 are doubled."""
    if scales != jnp.uint8:
        return q.astype(jnp.float32) - zero
    bits = q.astype(jnp.uint32)
    doubled = (DOUBLED_E2M1 >> ((bits & 7) << 2) & 15).astype(jnp.int32).astype(jnp.float32)
    return jnp.where(bits > 7, -doubled, doubled)


def wide_scales(scales: Shaped[Array, "..."]) -> Float32[Array, "..."]:
    """Scales for `wide_numbers`: half of a power of two, whose exponent is stored with 127 added. Scales whose exponent is
    stored as 0 or 1 become 0, since their numbers are below 1e-36."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(jnp.maximum(scales.astype(jnp.int32) - 1, 0) << 23, jnp.float32)


def e2m1_pairs(words: Integer[Array, "..."], scales: Shaped[Array, "..."]) -> list[Integer[Array, "..."]]:
    """The scaled numbers of uint32 words of eight in MXFP4, two in each word as bfloat16: at places 0 and 4, 1 and 5, …

    There is a uint8 scale for each word. With one stored as 0 or above 252 the numbers may be anything.
    """
    signs = np.uint32(0x80008000)
    is_number = (words & 0x77777777 ^ 0x11111111) + 0x77777777 >> 3  # the lowest bit of every four: it is not 0
    # a number's exponent is added to that of its scale, without products and conversions, which take a GPU longer
    exponents = jnp.maximum(scales.astype(jnp.uint32), 1) - 1
    exponents = exponents << 7 | exponents << 23
    pairs = []
    for place in range(4):
        mask = (is_number >> 4 * place & 0x10001) * 0x7FFF
        sizes = exponents + ((words >> 4 * place & 0x70007) << 6)
        pairs.append(sizes & mask | words << 12 - 4 * place & signs)
    return pairs


def row_group(weight_group: int) -> int:
    """Numbers of a rounded row with one scale: 32, unless groups of a weight are smaller or no multiples of that."""
    return gcd(weight_group, 32)


@partial(jax.tree_util.register_dataclass, data_fields=["gates", "ups"], meta_fields=[])
@dataclass(frozen=True)
class ExpertSides:
    """Stands for a stack `[X, E, 2, F]`: gates and ups `[X, E, F]` as arrays, their shapes or their placements.

    jax's grouped product of TPUs reads them apart; every layer would copy joined ones into another layout.
    """

    gates: Any
    ups: Any

    @classmethod
    def of(cls, stack: Shaped[Array, "X E 2 F"]) -> "ExpertSides":
        return cls(stack[:, :, 0], stack[:, :, 1])

    def joined(self) -> Shaped[Array, "X E 2 F"]:
        return jnp.stack([self.gates, self.ups], axis=2)

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_inputs, columns = self.gates.shape
        return num_experts, num_inputs, 2, columns

    @property
    def dtype(self) -> jnp.dtype:
        return self.gates.dtype

    @property
    def size(self) -> int:
        return self.gates.size + self.ups.size

    def __len__(self) -> int:
        return len(self.gates)
