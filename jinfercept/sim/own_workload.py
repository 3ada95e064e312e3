"""A workload of the user's own: draws scripts of requests with a user's code, and checks every one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from jinfercept.errors import ConfigError, describe_failure
from jinfercept.sched.plugins import build_plugin, label, source_line
from jinfercept.sim.workload import MOST_TOKENS, Script, Segment


class Workload(Protocol):
    """Draws requests. A function of a `Random` is one, and so is an object that can be called with it."""

    def __call__(self, rng: Random) -> Script:
        """The next request; called once for each arrival, in order. All randomness must come from `rng`, so that a seed
        repeats a run."""
        ...


type WorkloadChoice = str | Workload | type[Workload]
"""A place, `path.py:Name` or `package.module:Name`; a class, which is made anew for every seed and rate; or a workload."""


@dataclass(frozen=True)
class OwnWorkload:
    """A user's workload, whose requests must have fewer than `max_model_len` tokens.

    Raises `ConfigError` if there is no such workload, it raises, or it draws a request that cannot be played.
    """

    choice: WorkloadChoice
    max_model_len: int

    def __post_init__(self) -> None:
        self.drawer(Random(0))()

    def drawer(self, rng: Random) -> Callable[[], Script]:
        name = label(self.choice)
        draw = build_plugin("workload", self.choice, Workload)
        if not callable(draw):
            fix = "a function of a Random, or a class whose objects are called with one"
            raise ConfigError(
                "a workload must be callable and return a Script", got=f"{name}, a {type(draw).__name__}", fix=fix
            )

        def drawn() -> Script:
            try:
                script = draw(rng)
            except Exception as error:  # it is the user's
                got = describe_failure(error) + source_line(error, __file__)
                raise ConfigError(f"the workload {name} raises", got=got, fix="correct it") from error
            if problem := self._problem(script):
                fix = "Script(kind, prompt, (Segment(decode, call_s, returned), …, Segment(decode, None, 0)))"
                raise ConfigError(f"the workload {name} draws {problem}", got=f"{script!r:.200}", fix=fix)
            return script

        return drawn

    def _problem(self, script: object) -> str:
        if not isinstance(script, Script) or not isinstance(script.kind, str):
            return "what is no Script"
        if not _is_count(script.prompt, 1):
            return f"a prompt of no tokens from 1 to {MOST_TOKENS:,}"
        if not script.segments or not all(_is_playable(segment) for segment in script.segments):
            return "a segment that generates nothing, returns no number of tokens, or whose call lasts no time"
        calls = [segment.call_s is not None for segment in script.segments]
        if calls != [True] * (len(calls) - 1) + [False]:
            return "segments of which not exactly the last has no call"
        if script.context >= self.max_model_len:
            return f"a request of {script.context} tokens, where fewer than {self.max_model_len} fit"
        return ""


def _is_playable(segment: object) -> bool:
    return (
        isinstance(segment, Segment)
        and _is_count(segment.decode, 1)
        and _is_count(segment.returned, 0)
        and (segment.call_s is None or (isinstance(segment.call_s, int | float) and 0 <= segment.call_s < float("inf")))
    )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_TOKENS
