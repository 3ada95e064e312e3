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
    """The paper's estimate `T = now - t_call`: a call lasts as long as it has lasted (break-even ski rental; InferCept §4.4)."""

    def observe(self, name: str, duration_s: float) -> None:
        """Nothing is learned."""

    def duration_s(self, name: str, age_s: float) -> float:
        return age_s
