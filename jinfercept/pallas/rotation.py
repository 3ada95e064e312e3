"""What becomes of queries and keys between their product and attention, for kernels that do it themselves."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Rotation(NamedTuple):
    """The rotary embedding of a step's queries and keys, behind a root-mean-square norm in models that have one.

    Attributes:
        cos, sin: of every token's angles, float32, one for each pair of turning dimensions.
        interleaved: a pair is two neighbours; otherwise it is a dimension of the first half of those that turn, and one of
            the second half.
        q_norm, k_norm: the norms' scales; both None without norms.
        eps: of the norms.
    """

    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]
    interleaved: bool
    q_norm: Float[Array, "D"] | None = None
    k_norm: Float[Array, "D"] | None = None
    eps: float = 0.0
