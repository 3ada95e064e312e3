"""What a layer's attention does to queries, keys and scores, where it is not the plain softmax of all visible keys."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Scoring(NamedTuple):
    """The scores of one layer's attention; `PLAIN` has none of these."""

    window: int | None = None  # tokens that a query sees, itself and those before it; None: all before it
    # scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv 2408.00118, section 2)
    soft_cap: float | None = None
    # a score for each query head that takes its part of the softmax and has no value (gpt-oss)
    sinks: Float[Array, "H"] | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.soft_cap is None and self.sinks is None

    def within(self, most_tokens: int) -> "Scoring":
        """The same for contexts of at most `most_tokens` tokens, without a window that holds them all."""
        return self._replace(window=None) if self.window is not None and self.window >= most_tokens else self


PLAIN = Scoring()


class Rotation(NamedTuple):
    """The rotary embedding of a step's queries and keys, behind a root-mean-square norm in models that have one."""

    cos: Float[Array, "T half"]  # these are of every token's angles, float32, one for each pair of turning dimensions
    sin: Float[Array, "T half"]
    interleaved: bool  # a pair is two neighbours; otherwise it has a dimension of each half of those that turn
    q_norm: Float[Array, "D"] | None = None  # the norms' scales; both None without norms
    k_norm: Float[Array, "D"] | None = None
    eps: float = 0.0  # of the norms
