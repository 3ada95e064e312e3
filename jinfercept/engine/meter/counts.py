"""Totals and histograms of an engine since its start. Numbers are tokens unless the name says otherwise.

Histograms that vLLM has too use its bounds, so that quantiles can be compared. A turn is what is generated between two pauses.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, final

from jinfercept.engine.meter.ledger import WasteTotals


class LatencyLimits(NamedTuple):
    """Limits that a request or a turn must keep to count as goodput."""

    first_token_s: float  # most seconds from its arrival to its first token
    per_token_s: float  # most seconds per generated token from there on, as a mean, calls not counted
    new_token_s: float = 1e-4  # seconds more to the first token of a turn for each token of it that is new

    def keeps(self, delay_s: float, new_tokens: int, rest_s: float, generated: int) -> bool:
        """Whether a turn stays within the limits.

        Args:
            delay_s: seconds from its submission to its first token.
            new_tokens: tokens that it adds to what the conversation had.
            rest_s: seconds from the first token to the last.
        """
        first = delay_s <= self.first_token_s + self.new_token_s * new_tokens
        return first and rest_s <= self.per_token_s * max(1, generated - 1)


LIMITS = LatencyLimits(first_token_s=2.0, per_token_s=0.05)
"""The limits unless others are given."""


OTHER = "<other>"
"""Label of all names beyond the bound of a `BoundedNames`. No tool has a name in angle brackets."""

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_CALL_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))


@final
class Histogram:
    """Counts values by upper bound. The bounds ascend; a last one, infinite, is implied."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, number of values up to it) pairs; the last bound is infinite."""
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))


@final
class BoundedNames:
    """Bounds the number of label values of a metric: MCP servers change tool names, policies choose the words of reasons."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._labels: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The name, or `OTHER` if it is new and there are `most` already."""
        if name not in self._labels and len(self._labels) < self._most:
            self._labels[name] = name
        return self._labels.get(name, OTHER)


@dataclass(slots=True)
class ToolCounts:
    """The interceptions of one label: a tool, all client-run tools, or the readers of finished answers."""

    begun: int = 0
    given_up: int = 0  # ended without a return: the request was aborted, or no follow-up request came
    results: Counter[str] = field(default_factory=Counter)  # returned calls, by status
    # Of the interceptions that ended in a return: their seconds, and the sums of those that were predicted when they
    # began and of |predicted - actual|.
    duration_s: Histogram = field(default_factory=lambda: Histogram(_CALL_S))
    predicted_s: float = 0.0
    error_s: float = 0.0
    kept: int = 0  # tokens of resumed contexts that were on the device
    copied_in: int = 0  # likewise, on the host
    recomputed: int = 0  # likewise, lost
    resume_s: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))  # from the return to the next token


@dataclass(slots=True)
class EngineCounts:
    """All totals and histograms."""

    prompt: int = 0  # of requests that have a first token
    cached: int = 0  # prompt tokens that were not computed
    generated: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # requests, by finish reason
    steps: Counter[int] = field(default_factory=Counter)  # by bucket; bucket 0 is steps that only move pages
    step_s: dict[int, float] = field(default_factory=dict)  # likewise
    moved_pages: Counter[tuple[str, str]] = field(default_factory=Counter)  # by action and reason
    copied_out: int = 0  # tokens that the host link carried, empty places of pages included
    copied_in: int = 0  # likewise
    link_budget: float = 0.0  # tokens that the link could have carried one way during the steps
    waste: WasteTotals = field(default_factory=WasteTotals)
    tools: dict[str, ToolCounts] = field(default_factory=dict)  # by label
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    turns: Counter[bool] = field(default_factory=Counter)  # that have ended, by whether they kept `LIMITS`
    # From a turn's submission (its request's arrival, its calls' return) to its first token, without seconds at the door.
    turn_delay_s: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))
    # Of conversations that have their first token.
    door_s: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))
    first_token_s: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))
    token_s: Histogram = field(default_factory=lambda: Histogram(_TOKEN_S))
    request_s: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    queued_s: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    prefill_s: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    decode_s: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    mean_token_s: Histogram = field(default_factory=lambda: Histogram(_TOKEN_S))
    request_prompt: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    request_generated: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
