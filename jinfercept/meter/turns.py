"""Turns of agents: the limits of time within which a turn counts as goodput. A turn is what is generated between two pauses."""

from typing import NamedTuple


class LatencyLimits(NamedTuple):
    """What a request or a turn must stay within to count as goodput.

    Attributes:
        first_token_s: most seconds from its arrival to its first token.
        per_token_s: most seconds per token from there on, calls not counted: the mean over its generated tokens.
        new_token_s: seconds more to the first token of a turn for each token of it that is new.
    """

    first_token_s: float
    per_token_s: float
    new_token_s: float = 1e-4

    def keeps(self, delay_s: float, new_tokens: int, rest_s: float, generated: int) -> bool:
        """Whether a turn stays within them.

        Args:
            delay_s: seconds from its submission to its first token.
            new_tokens: tokens that it adds to what the conversation had.
            rest_s: seconds from the first token to the last.
        """
        first = delay_s <= self.first_token_s + self.new_token_s * new_tokens
        return first and rest_s <= self.per_token_s * max(1, generated - 1)


LIMITS = LatencyLimits(first_token_s=2.0, per_token_s=0.05)
"""The limits unless others are given."""
