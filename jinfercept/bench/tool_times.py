"""How long tools take: a number of seconds, or a distribution to draw from. Knows no workloads and no clock."""

import math
from collections.abc import Callable
from random import Random

from jinfercept.errors import ConfigError

DrawSeconds = Callable[[Random], float]

FORMS = "X, exp:MEAN or lognormal:MEDIAN,SIGMA"


def tool_times(text: str) -> DrawSeconds:
    """How to draw seconds from what a flag says: always `X`, exponential, or log-normal (σ of the logarithm).

    Raises:
        ConfigError: it says something else, or a number out of range.
    """
    name, _, rest = text.rpartition(":")
    try:
        numbers = [float(one) for one in rest.split(",")]
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
