"""Durations of tools in seconds: constant, exponential or log-normal."""

import math
from collections.abc import Callable
from random import Random

from jinfercept.errors import ConfigError

DrawSeconds = Callable[[Random], float]

FORMS = "X, exp:MEAN or lognormal:MEDIAN,SIGMA"


def tool_times(text: str) -> DrawSeconds:
    """A draw of seconds from a flag's text: always `X`, exponential, or log-normal (σ of the logarithm).

    Raises:
        ConfigError: the text has another form, or a number out of range.
    """
    name, _, rest = text.rpartition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if all(0 <= number < math.inf for number in numbers):
        match name, numbers:
            case "", [seconds]:
                return lambda rng: seconds
            case "exp", [mean]:
                return lambda rng: mean * rng.expovariate(1.0)
            case "lognormal", [median, sigma]:
                return lambda rng: median * math.exp(sigma * rng.gauss())
            case _:
                pass
    raise ConfigError("--tool-seconds is no time", got=text, fix=f"{FORMS}, in seconds")
