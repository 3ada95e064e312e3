"""How long an interception will last, as a function of how long it has lasted. Decides nothing."""

from typing import Protocol, final


class Estimator(Protocol):
    """Predicts durations of interceptions, by the name of the tool that was called."""

    def observe(self, name: str, duration_s: float) -> None:
        """A call of `name` returned after so many seconds."""
        ...

    def duration_s(self, name: str, age_s: float) -> float:
        """Expected total seconds of a call of `name` that has lasted `age_s` so far."""
        ...


@final
class ElapsedEstimator:
    """The paper's estimate `T = now - t_call`: a call will last as long again as it has lasted (InferCept §4.4).

    This is break-even ski rental: at most twice the cost of knowing.
    """

    def observe(self, name: str, duration_s: float) -> None:
        """Nothing is learned."""

    def duration_s(self, name: str, age_s: float) -> float:
        return age_s
