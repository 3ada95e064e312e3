"""Refuses simulated requests whose first token would come too late, and compares forecasts with what came. Imports no JAX."""

from typing import NamedTuple, final

from jinfercept.engine.engine import Engine
from jinfercept.request import Request
from jinfercept.sched.cost import CostModel
from jinfercept.sched.first_token import FirstTokenAdmission


class CheckedForecast(NamedTuple):
    """Seconds from a request's arrival to its first token: predicted when it came, and actual."""

    predicted_s: float
    actual_s: float


@final
class FirstTokenGate:
    """Decides about the requests of one run.

    Args:
        cost: the prices that the engine's scheduler plans with.
        largest_step: query tokens of its largest step.
        limit_s: most seconds to a first token.

    Attributes:
        refused: seconds after which each refused request was asked to come again, by its id.
        checks: forecasts of the requests that were taken, once their first token has come.
    """

    def __init__(self, engine: Engine, cost: CostModel, largest_step: int, limit_s: float) -> None:
        self._engine, self._limit_s = engine, limit_s
        self._admission = FirstTokenAdmission(cost, largest_step)
        self._taken: dict[str, float] = {}  # predicted seconds
        self.refused: dict[str, float] = {}
        self.checks: list[CheckedForecast] = []

    def takes(self, request: Request) -> bool:
        """Whether a request that arrives is taken."""
        self.learn()
        decision = self._admission.decide(self._engine.load(), self._engine.work_of(request), self._limit_s)
        if decision.retry_s is not None:
            self.refused[request.id] = decision.retry_s
            return False
        self._taken[request.id] = decision.forecast_s
        self._admission.began(request.id, request.tenant, decision, self._limit_s)
        return True

    def learn(self) -> None:
        """Take the first tokens that have come."""
        for request_id, actual_s in self._engine.take_first_tokens():
            predicted_s = self._taken.pop(request_id)
            self._admission.ended(request_id, actual_s)
            if actual_s is not None:
                self.checks.append(CheckedForecast(predicted_s, actual_s))
