"""Stacks of experts' gated matrices with gates and ups apart, as jax's grouped product of TPUs reads them.

Every layer would copy joined ones into another layout.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


@partial(jax.tree_util.register_dataclass, data_fields=["gates", "ups"], meta_fields=[])
@dataclass(frozen=True)
class ExpertSides:
    """Stands for a stack `[X, E, 2, F]`: gates and ups `[X, E, F]` as arrays, their shapes or their placements."""

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
