"""The sources of one sequence's drafts, and how often they were accepted lately."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

_MOST_CANDIDATES = 16
"""Earlier occurrences of the shortest n-gram that are compared, the latest first."""


@final
class NgramIndex:
    """The n-grams of one growing list of tokens: prompt, generated tokens and results of calls alike.

    Memory is one entry per token. The time of a draft does not grow with the list.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self._shortest, self._longest = shortest, longest
        self._latest: dict[tuple[int, ...], int] = {}  # where an n-gram of the shortest length ended last
        self._before: dict[int, int] = {}  # where the one that ends here ended before
        self._end = shortest  # of the n-gram that is entered next

    def draft(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens that followed the last occurrence of the longest n-gram with which `tokens` ends."""
        if count < 1 or len(tokens) <= self._shortest:
            return ()
        # the list is that of the last call, with new tokens behind
        for end in range(self._end, len(tokens)):
            ngram = tuple(tokens[end - self._shortest : end])
            if (previous := self._latest.get(ngram)) is not None:
                self._before[end] = previous
            self._latest[ngram] = end
        self._end = max(self._end, len(tokens))
        best, best_at = self._shortest - 1, None
        at = self._latest.get(tuple(tokens[len(tokens) - self._shortest :]))
        for _ in range(_MOST_CANDIDATES):
            if at is None or best == self._longest:
                break
            if (length := self._common(tokens, at)) > best:
                best, best_at = length, at
            at = self._before.get(at)
        if best_at is None:
            return ()
        # a continuation that reaches the end of the list goes on with itself, so that a repetition is drafted as one
        period = len(tokens) - best_at
        return tuple([tokens[best_at + index % period] for index in range(count)])

    def _common(self, tokens: Sequence[int], end: int) -> int:
        length = self._shortest
        while length < min(self._longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


_PRIOR = 2.0
"""Number of drafts that the expected chance weighs, which is assumed before any draft was tried."""
_KEPT = 0.9
"""Weight of earlier results against those of a draft that is tried."""
_KEPT_UNTRIED = 0.995
"""The same in a step that found a draft and did not try it. Where all drafts are refused, one is tried in about 30 steps,
which costs less than 2 % of the time."""


class Acceptance:
    """How many drafts were accepted lately, by their place among the drafts of a step."""

    __slots__ = ("_tried", "accepted")

    def __init__(self, num_places: int) -> None:
        # by place; older drafts count less
        self._tried, self.accepted = [0.0] * num_places, [0.0] * num_places

    def chances(self, before: Sequence[float]) -> list[float]:
        """For each place, the chance that its draft is accepted if those before it are; `before`: the same before any was
        tried."""
        places = zip(self.accepted, self._tried, before, strict=True)
        return [(accepted + _PRIOR * chance) / (tried + _PRIOR) for accepted, tried, chance in places]

    def note(self, num_drafts: int, accepted: int) -> None:
        """Count the drafts of a step. Those behind the first refused one say nothing."""
        for place in range(min(num_drafts, accepted + 1)):
            self._tried[place] = _KEPT * self._tried[place] + 1
            self.accepted[place] = _KEPT * self.accepted[place] + (place < accepted)
        self.forget(num_drafts)

    def forget(self, start: int = 0) -> None:
        """Age the counts from place `start` on: a step found drafts there and did not try them."""
        for seen in (self._tried, self.accepted):
            seen[start:] = [_KEPT_UNTRIED * number for number in seen[start:]]


@dataclass(slots=True)
class DraftState:
    """The sources and the acceptance of one sequence's drafts, owned by `Speculation`."""

    ngrams: NgramIndex | None  # of its tokens; None where a model drafts
    acceptance: Acceptance
    num_read: int  # leading tokens that the drafting layer has read without a gap
    proposed: tuple[int, ...] = ()  # drafts of that layer behind the first `num_tokens` tokens
    num_tokens: int = 0
