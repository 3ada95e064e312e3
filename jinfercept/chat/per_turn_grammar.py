"""A grammar that differs between the first turn of a chat and later ones."""

from typing import final

from jinfercept.hooks import Constraint, Grammar


@final
class PerTurnGrammar:
    """A `Grammar` for one request.

    Args:
        first: the grammar of the first turn.
        later: the grammar of all others; None if they are free.
    """

    def __init__(self, first: Grammar, later: Grammar | None) -> None:
        self._next: Grammar | None = first
        self._later = later

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        """The constraint of the next turn; see `hooks.Grammar`."""
        turn, self._next = self._next, self._later
        return None if turn is None else turn.constrain(end_token_ids)
