"""Distributions of generated requests: of the counts and seconds of each of the six kinds.

One family for everything, the log-normal clipped to bounds: skewed where the trace is, and with weight on its bounds, as
the trace has in counts of calls and in the answers of persons (the authors cut those at 60 s). The source is the mixed trace of
InferCept's authors (397 requests, contexts cut at about 2,048 tokens), whose extremes are the bounds. Medians and deviations of
logarithms were fitted so that mean and standard deviation after clipping are the source's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class LogNormal(NamedTuple):
    """A log-normal distribution, clipped to [low, high].

    Attributes:
        median: before clipping.
        between: standard deviation of the logarithm from request to request.
        within: the same among the values of one request.
    """

    median: float
    between: float = 0.0
    within: float = 0.0
    low: float = 0.0
    high: float = math.inf

    def at(self, request: float, value: float) -> float:
        """The value that belongs to two standard normal numbers: one of the request, one of the value itself."""
        return min(self.high, max(self.low, self.median * math.exp(self.between * request + self.within * value)))


class TurnDistributions(NamedTuple):
    """Tokens that are generated, the call after them in seconds, and the tokens that come back.

    Attributes:
        typed: a person answers: a long reply takes long to write, so `call_s` and `returned` are drawn together
            (correlation of their logarithms in the trace: 0.91).
    """

    decode: LogNormal
    call_s: LogNormal
    returned: LogNormal
    typed: bool = False


@dataclass(frozen=True, slots=True)
class KindDistributions:
    """The distributions of one kind of request.

    Attributes:
        rounds: how often the turns are gone through.
        answer: tokens generated after the last call; None: the request ends one token after it.
        split: `decode` and `answer` stand for the request as a whole and are divided by its number of segments.
    """

    prompt: LogNormal
    rounds: LogNormal
    turns: tuple[TurnDistributions, ...]
    answer: LogNormal | None
    split: bool = False


_REPLY = TurnDistributions(
    LogNormal(56.1, 0.2, 0.22, 1, 121),
    LogNormal(23.2, 0.62, 0.63, 3, 60),
    LogNormal(9, 1.15, 1.34, 0, 1354),
    typed=True,
)
_CHAT = KindDistributions(
    LogNormal(20.1, 1.98, 0, 1, 1728), LogNormal(2.95, 0.62, 0, 1, 8), (_REPLY,), LogNormal(224, 0.83, 0, 1, 1164)
)


def _made(call_s: LogNormal, returned: int) -> KindDistributions:
    """A chat in which a program turns every text into something before the person replies, as in the trace."""
    work = TurnDistributions(_REPLY.decode, call_s, LogNormal(returned))
    return replace(_CHAT, turns=(work, _REPLY._replace(decode=LogNormal(7))), answer=None)


DISTRIBUTIONS: Mapping[str, KindDistributions] = {
    "math": KindDistributions(
        LogNormal(405, 0.045, 0, 370, 483),
        LogNormal(3.8, 1.91, 0, 1, 4),
        (
            TurnDistributions(
                LogNormal(107, 0.5, 0.45, 20, 518),
                LogNormal(7.2e-5, 0.6, 0.3, 2.4e-5, 6e-4),
                LogNormal(19.9, 0.18, 0.18, 16, 51),
            ),
        ),
        LogNormal(28, 1.79, 0, 13, 1353),
    ),
    "qa": KindDistributions(
        LogNormal(933, 0.007, 0, 923, 955),
        LogNormal(4.3, 1.1, 0, 1, 4),
        (
            TurnDistributions(
                LogNormal(730, 0.44, 0.385), LogNormal(0.685, 0.25, 0.25, 0, 1.03), LogNormal(56.3, 0.1, 0.11, 33, 81)
            ),
        ),
        LogNormal(730, 0.44, 0.385),
        split=True,
    ),
    "ve": KindDistributions(  # the table's number of rounds; the window cuts it to the trace's
        LogNormal(1973),
        LogNormal(24.6, 0.62, 0, 4, 60),
        (TurnDistributions(LogNormal(4), LogNormal(0.0844, 0.19, 0, 0.05, 0.111), LogNormal(9, 0, 0.65, 2, 43)),),
        None,
    ),
    "chat": _CHAT,
    "image": _made(LogNormal(11.5, 0, 0.08, 8.8, 14), 8),
    "tts": _made(LogNormal(5.55, 0.07, 0.47, 0.08, 12), 9),
}
"""By kind."""
