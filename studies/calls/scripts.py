"""Scripts of requests that call in context markup language, and how long they take when they are alone.

A script has rounds of independent calls with prose to overlap them, and a trap. Each round depends on the results of the one
before it. Only counts and seconds: no text and no token ids, which `studies.calls.markup` writes.

The formulas are those of AsyncLM (arXiv 2412.07017), generalised to rounds. With `G` the seconds in which a call is written and
`E` those in which its tool works, the calls of a round last

    sync      ΣG + ΣE
    parallel  ΣG + max E
    async     max_i(Σ_{j≤i} G_j + E_i), and at least ΣG

where prose counts to the `G` of what follows it, the trap included. Rounds depend on each other: their seconds add up, those
of the prompt and of the answer too. Reading results is not in the formulas.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import NamedTuple, Self

from jinfercept.calls import CallMode
from jinfercept.errors import ConfigError
from jinfercept.sched.profile import CostModel

TRAP_TOKENS = 2
"""Tokens of a trap: two delimiters."""
MOST_SECONDS = 60.0
"""Limit of a drawn call."""


class ScriptedCall(NamedTuple):
    """A call in a script.

    Attributes:
        tool: name of the tool.
        decode: tokens of the call in markup.
        seconds: how long the tool takes.
        returned: tokens of the result, without its markup.
        prose: tokens that the model writes behind the call and that do not depend on it.
    """

    tool: str
    decode: int
    seconds: float
    returned: int
    prose: int = 0


class CallScript(NamedTuple):
    """A request: a prompt, rounds of calls that each end with a trap, and an answer.

    Attributes:
        prompt: tokens of the prompt.
        rounds: the calls of each round, in the order in which they are written.
        answer: tokens behind the last trap, at least 1.
        calls: when the calls run.
    """

    prompt: int
    rounds: tuple[tuple[ScriptedCall, ...], ...]
    answer: int = 1
    calls: CallMode = "async"

    @property
    def generated(self) -> int:
        """Tokens that the model generates."""
        return self.answer + sum(TRAP_TOKENS + sum(call.decode + call.prose for call in calls) for calls in self.rounds)

    @property
    def seconds(self) -> float:
        """Seconds of all calls together."""
        return sum(call.seconds for calls in self.rounds for call in calls)

    @property
    def longest_first(self) -> Self:
        """The same calls, the longest of each round first; prose stays where it is.

        No other order of a round's calls is faster when they are asynchronous: each call's work follows its writing as a
        delivery follows a job on one machine (Jackson's rule).
        """
        return self._replace(rounds=tuple(map(_longest_first, self.rounds)))

    def written_rounds(self) -> "Iterator[WrittenRound]":
        """Where the rounds stand in the generated tokens."""
        generated = 0
        for calls in self.rounds:
            placed = list[tuple[int, float]]()
            for call in calls:
                placed.append((generated + call.decode, call.seconds))
                generated += call.decode + call.prose
            generated += TRAP_TOKENS
            yield WrittenRound(placed, generated)


class WrittenRound(NamedTuple):
    """Where a round stands in the generated tokens.

    Attributes:
        calls: for each the number of tokens that are generated when it is complete, and its seconds.
        trap: the number of tokens when the trap is complete.
    """

    calls: list[tuple[int, float]]
    trap: int


def _longest_first(calls: tuple[ScriptedCall, ...]) -> tuple[ScriptedCall, ...]:
    longest = sorted(calls, key=lambda call: -call.seconds)
    return tuple(call._replace(prose=place.prose) for call, place in zip(longest, calls, strict=True))


# -- generated ---------------------------------------------------------------------------------------------------------


def _log_uniform(low_s: float, high_s: float) -> Callable[[Random], float]:
    return lambda rng: round(low_s * (high_s / low_s) ** rng.random(), 4)


def _log_normal(median_s: float, sigma: float) -> Callable[[Random], float]:
    return lambda rng: round(min(MOST_SECONDS, median_s * math.exp(sigma * rng.gauss())), 4)


DURATIONS: Mapping[str, Callable[[Random], float]] = {
    "short": _log_uniform(0.03, 0.5),
    "heavy": _log_normal(0.15, 1.5),
}
"""Seconds of calls by tool: log-uniform from 30 to 500 ms, and heavy-tailed: log-normal, median 150 ms, mean 460 ms, one of a
hundred over 4.9 s."""


@dataclass(frozen=True, slots=True)
class CallMix:
    """What a generated request looks like.

    Attributes:
        calls: number of calls.
        prose: share of the tokens before the answer, traps left out, that are prose behind calls; 0 to below 1.
        rounds: dependent rounds over which the calls are divided evenly, at most one for each call.
        tool: a name of `DURATIONS`.
        decode: tokens of the shortest and the longest call.
        returned: tokens of the shortest and the longest result.
        prompt: tokens of the prompt.
        answer: tokens of the answer.
    """

    calls: int
    prose: float = 0.0
    rounds: int = 1
    tool: str = "short"
    decode: tuple[int, int] = (28, 44)
    returned: tuple[int, int] = (2, 20)
    prompt: int = 128
    answer: int = 1

    def __post_init__(self) -> None:
        if self.tool not in DURATIONS:
            raise ConfigError("no such durations of calls", got=self.tool, fix=f"one of {', '.join(DURATIONS)}")
        if not 1 <= self.rounds <= self.calls:
            raise ConfigError("every round has a call", got=f"{self.rounds} rounds, {self.calls} calls", fix="fewer")
        if not 0 <= self.prose < 1:
            raise ConfigError("prose is a share of the tokens", got=self.prose, fix="at least 0 and below 1")

    def draw(self, rng: Random) -> CallScript:
        """A request of this mix."""
        calls = [
            ScriptedCall(self.tool, rng.randint(*self.decode), DURATIONS[self.tool](rng), rng.randint(*self.returned))
            for _ in range(self.calls)
        ]
        total = round(sum(call.decode for call in calls) * self.prose / (1 - self.prose))
        ends = [total * number // self.calls for number in range(self.calls + 1)]
        written = [call._replace(prose=ends[i + 1] - ends[i]) for i, call in enumerate(calls)]
        borders = [self.calls * number // self.rounds for number in range(self.rounds + 1)]
        rounds = tuple(tuple(written[borders[i] : borders[i + 1]]) for i in range(self.rounds))
        return CallScript(self.prompt, rounds, self.answer)


Written = Callable[[int], float]
"""Seconds from a request's arrival until it has generated so many tokens, if it never waits and reads no result."""


def formula_s(script: CallScript, written: Written) -> float:
    """Seconds from a request's arrival to its last token."""
    waited = (_waited_s(script.calls, written_round, written) for written_round in script.written_rounds())
    return written(script.generated) + sum(waited)


def _waited_s(mode: CallMode, written_round: WrittenRound, written: Written) -> float:
    """Seconds in which the request waits for the calls of a round."""
    if mode == "sync":
        return sum(seconds for _, seconds in written_round.calls)
    if mode == "parallel":
        return max((seconds for _, seconds in written_round.calls), default=0.0)
    last_s = max((written(end) + seconds for end, seconds in written_round.calls), default=0.0)
    return max(0.0, last_s - written(written_round.trap))


def priced(script: CallScript, cost: CostModel) -> Written:
    """`Written` for a request alone, by the prices of its steps: one for the whole prompt, then one for each token."""
    steps = (cost.step_s(1, script.prompt + number) for number in range(1, script.generated))
    ends = list(accumulate(steps, initial=cost.step_s(script.prompt, script.prompt)))
    return lambda num_tokens: ends[num_tokens - 1] if num_tokens else 0.0
