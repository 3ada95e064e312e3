"""Norm and rotation of queries and keys before attention, for kernels that compute them."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Rotation(NamedTuple):
    """The rotary embedding of a step's queries and keys, behind a root-mean-square norm in models that have one."""

    cos: Float[Array, "T half"]  # these are of every token's angles, float32, one for each pair of turning dimensions
    sin: Float[Array, "T half"]
    interleaved: bool  # a pair is two neighbours; otherwise it has a dimension of each half of those that turn
    q_norm: Float[Array, "D"] | None = None  # the norms' scales; both None without norms
    k_norm: Float[Array, "D"] | None = None
    eps: float = 0.0  # of the norms
