"""What one sequence's drafts come from, and how many of them were accepted lately."""

from typing import NamedTuple

from jinfercept.sched.ngrams import NgramIndex

_PRIOR = 2.0
"""Drafts as which the chance counts that is expected before any was tried."""
_KEPT = 0.9
"""Weight of what was seen before a step with drafts, against that step."""
_KEPT_UNTRIED = 0.98
"""The same in a step in which a draft was found and not tried: after some time it is tried again."""


class Acceptance:
    """How many drafts were accepted lately; mutable."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._tried = self._accepted = 0.0

    def chance(self, before: float) -> float:
        """That a draft is accepted if those before it are.

        Args:
            before: the same if nothing was tried.
        """
        return (self._accepted + _PRIOR * before) / (self._tried + _PRIOR)

    def note(self, num_drafts: int, accepted: int) -> None:
        """A step had drafts; those behind the first refused one say nothing."""
        self._tried = _KEPT * self._tried + min(num_drafts, accepted + 1)
        self._accepted = _KEPT * self._accepted + accepted

    def forget(self) -> None:
        """A step went without the drafts that were found."""
        self._tried *= _KEPT_UNTRIED
        self._accepted *= _KEPT_UNTRIED


class DraftState(NamedTuple):
    """What one sequence's drafts come from and became, owned by `Speculation`.

    Attributes:
        ngrams: of its tokens; None with a draft model.
    """

    ngrams: NgramIndex | None
    acceptance: Acceptance
