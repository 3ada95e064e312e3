"""`AdaptedTensor`: a weight with low-rank adapters (LoRA, arXiv 2106.09685) beside it, in its place among a model's parameters.

A step multiplies its rows with the `A` matrices of all adapters in one product, drops the columns of other rows' adapters, and
multiplies the rest with all `B` matrices. For few adapters that is faster than to gather each row's matrices.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b", "rows"], meta_fields=[])
@dataclass(frozen=True)
class AdaptedTensor:
    """A weight and the matrices of its adapters, for `P` adapted parts and `C` columns, as many as all adapters' ranks."""

    base: Any  # an array or a `QuantizedTensor`
    a: Any  # [*inputs, P, C]
    # For each part of a joined weight, in the order of its columns, `[C, *outputs]`, multiplied by the adapters' scale,
    # or None if no adapter changes it; any other weight has one part.
    b: tuple[Any, ...]
    rows: Any = None  # [T, adapters], whether an adapter is the row's; None outside a step

    def own_columns(self, inner: Float[Array, "T P C"]) -> Float[Array, "T P C"]:
        """The products `inner` of the rows with `a`, those with other rows' adapters replaced by zeros."""
        by_adapter = inner.reshape(*inner.shape[:2], self.rows.shape[1], -1)
        # not a product with 0, which would make infinite numbers NaN
        return jnp.where(self.rows[:, None, :, None], by_adapter, 0).reshape(inner.shape)

    def joined(self, parts: list[Float[Array, "T ..."] | None]) -> Float[Array, "T ..."]:
        """Join the changes of a joined weight's parts in the order of its columns; any other weight has one part."""
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        like = next(part for part in parts if part is not None)
        widths = (self.base.shape[-2] - 2, 1, 1) if len(parts) == 3 else (1, 1)  # of the KV heads, or of a gate's side
        filled = [
            jnp.zeros((*like.shape[:-2], width, like.shape[-1]), like.dtype) if part is None else part
            for part, width in zip(parts, widths, strict=True)
        ]
        return jnp.concatenate(filled, axis=-2)


def is_adapted(weight: Any) -> bool:
    """Whether a weight has adapters. As `is_leaf` it makes such weights the leaves of a tree."""
    return isinstance(weight, AdaptedTensor)


def without_adapters[T](params: T) -> T:
    """A tree of weights without their adapters."""
    return jax.tree.map(lambda weight: weight.base if is_adapted(weight) else weight, params, is_leaf=is_adapted)


def for_rows[T](params: T, adapters: Int[Array, "T"], num_adapters: int) -> T:
    """A tree of weights whose adapters are those of a step's rows: `adapters` numbers each row's from 1 on, 0 is none."""
    rows = adapters[:, None] == jnp.arange(1, num_adapters + 1, dtype=adapters.dtype)[None]
    return jax.tree.map(
        lambda weight: replace(weight, rows=rows) if is_adapted(weight) else weight, params, is_leaf=is_adapted
    )
