"""Predicts when a new request would get its first token, and refuses it if that is too late.

A request waits for memory (or a slot), then for its prompt to be computed. It waits for what goes before it: all of its own
tenant's waiting requests, and of another tenant's as much as weighted fair sharing serves meanwhile. Memory comes free as
runs end: `n` running sequences that generate `g` tokens each, in steps of `t` seconds, end `n / (g · t)` times a second; the
share of runs that are the first of their request is the rate at which requests leave, and so at which new ones may start.

The rest (how contexts of calls are held, that runs do not end evenly) is in two factors that are learned from what came of
earlier forecasts: their mean error, and the error that 19 of 20 stay below.
"""

from collections import deque
from typing import NamedTuple, final

from jinfercept.sched.cost import CostModel
from jinfercept.sched.fairness import has_right_to_memory, work_before
from jinfercept.sched.load import EngineLoad, QueuedWork

_KEPT = 128
"""Forecasts from which the factors are learned."""
_MOST_OPEN = 8192
"""Forecasts that wait for their first token."""
_MOST_TENANTS = 1024
"""Tenants whose errors are remembered."""
_QUANTILE = 0.95
_PRIOR = 4
"""Number of forecasts as which the factors' first values count."""
_PRIOR_LATE = 1.5
_MOST = 8.0
"""Limit of a factor, and its inverse."""
_TOLD = 0.1
"""Share of the limit below which a forecast teaches nothing: steps and rounding are all of it."""


class FirstTokenDecision(NamedTuple):
    """Whether a request is taken.

    Attributes:
        forecast_s: predicted seconds to its first token.
        raw_s: the same before it is corrected by what was learned.
        retry_s: seconds after which a request like it would be taken, if no other request came; None: it is taken now.
    """

    forecast_s: float
    raw_s: float
    retry_s: float | None


class _Errors:
    """What came of the latest forecasts for one tenant.

    Attributes:
        mean: actual seconds over predicted ones.
        late: the ratio that 19 of 20 stay below.
    """

    __slots__ = ("_came", "late", "mean")

    def __init__(self) -> None:
        self._came: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # predicted and actual seconds
        self.mean, self.late = 1.0, _PRIOR_LATE

    def add(self, raw_s: float, actual_s: float) -> None:
        self._came.append((raw_s, actual_s))
        raw, actual = (sum(part) for part in zip(*self._came, strict=True))
        prior = _PRIOR * raw / len(self._came)
        self.mean = _bounded((actual + prior) / (raw + prior))
        ratios = sorted([*[came / predicted_s for predicted_s, came in self._came], *[_PRIOR_LATE] * _PRIOR])
        self.late = _bounded(max(self.mean, ratios[int(_QUANTILE * (len(ratios) - 1))]))


@final
class FirstTokenAdmission:
    """Takes and refuses the requests of one engine.

    Args:
        largest_step: query tokens of the largest step.
    """

    def __init__(self, cost: CostModel, largest_step: int) -> None:
        self._cost, self._largest = cost, largest_step
        self._open: dict[str, tuple[str, float]] = {}  # tenant and raw forecast of requests without a first token
        self._errors: dict[str, _Errors] = {}  # by tenant, the one that was used last at the end

    def decide(self, load: EngineLoad, request: QueuedWork, limit_s: float) -> FirstTokenDecision:
        """Take a request, or refuse it because its first token is likely to come later than the limit.

        Args:
            limit_s: most seconds to its first token.
        """
        errors = self._errors.get(request.tenant) or _Errors()
        raw_s = first_token_s(self._cost, self._largest, load, request)
        retry_s = None
        if raw_s * errors.late > limit_s and (load.num_running or load.queued):  # else no waiting makes it sooner
            retry_s = errors.mean * (raw_s - limit_s / errors.late)
        return FirstTokenDecision(raw_s * errors.mean, raw_s, retry_s)

    def began(self, request_id: str, tenant: str, decision: FirstTokenDecision, limit_s: float) -> None:
        """A request was taken; its first token is compared with the forecast, if that said anything."""
        if decision.raw_s > _TOLD * limit_s:
            self._open[request_id] = tenant, decision.raw_s
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]

    def ended(self, request_id: str, first_token_s: float | None) -> None:
        """A request has its first token after so many seconds, or ends without one (None)."""
        tenant, raw_s = self._open.pop(request_id, ("", 0.0))
        if not raw_s or first_token_s is None:
            return
        errors = self._errors.pop(tenant, None) or _Errors()
        self._errors[tenant] = errors
        errors.add(raw_s, first_token_s)
        if len(self._errors) > _MOST_TENANTS:
            del self._errors[next(iter(self._errors))]


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / _MOST), _MOST)


def first_token_s(cost: CostModel, largest_step: int, load: EngineLoad, request: QueuedWork) -> float:
    """Predicted seconds to the first token of a request that comes now.

    Args:
        largest_step: query tokens of the largest step.
    """
    tokens, uncomputed, number = work_before(load, request)
    running, computing = load.num_running, load.running_uncomputed + uncomputed + request.uncomputed
    decoding_s = cost.step_s(max(1, min(running, largest_step)), load.running_tokens)
    own_s = _prefill_s(cost, largest_step, running, request.uncomputed, load.running_tokens)
    compute_s = _prefill_s(cost, largest_step, running, computing, load.running_tokens)
    starts_s = 0.0
    needed = tokens + request.num_tokens
    lacking = max((needed - load.free_tokens) / needed * (number + 1), number + 1.0 - load.free_slots)
    if lacking > 0.0 and running and not has_right_to_memory(load, request):
        starts_s = lacking / _starts_per_s(cost, largest_step, load)
    return decoding_s / 2 + max(compute_s, starts_s + own_s)


def _prefill_s(cost: CostModel, largest_step: int, running: int, tokens: float, context_tokens: int) -> float:
    """Seconds of the steps that compute so many tokens beside the running sequences, which decode."""
    room = max(1, largest_step - running)
    full, rest = divmod(int(tokens), room)
    seconds = full * cost.step_s(largest_step, context_tokens)
    return seconds + (cost.step_s(min(largest_step, running + rest), context_tokens) if rest else 0.0)


def _starts_per_s(cost: CostModel, largest_step: int, load: EngineLoad) -> float:
    """Requests that can start in a second once memory is full."""
    means, running = load.means, load.num_running
    ended = running / max(1.0, means.generated)  # runs that end with a step
    step_s = cost.step_s(max(1, min(largest_step, round(running + ended * means.computed))), load.running_tokens)
    return ended * max(means.new, 0.01) / step_s
