"""Sessions of one shape, and the checks, displays and files of the commands that play them."""

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jinfercept.bench.conversations import Style
from jinfercept.bench.servers import Servers
from jinfercept.errors import ConfigError
from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import check_outputs
from jinfercept.sim.tables import check_least
from jinfercept.sim.workload import Script, Segment

DrawSeconds = Callable[[Random], float]

FORMS = "X, exp:MEAN or lognormal:MEDIAN,SIGMA"


class SessionShape(NamedTuple):
    """The lengths that all sessions share; their texts and the seconds of their tools are drawn.

    Attributes:
        turns: answers of a session; a tool runs between two of them.
        prompt_tokens: tokens of the first message, without the system prompt.
        tool_tokens: tokens of a tool's result.
        new_tokens: tokens of an answer.
    """

    turns: int
    prompt_tokens: int
    tool_tokens: int
    new_tokens: int
    tool_seconds: DrawSeconds

    def check(self) -> None:
        """Raise `ConfigError` if a number is out of range."""
        check_least("--turns", self.turns, 1)
        check_least("--prompt-tokens", self.prompt_tokens, 1)
        check_least("--tool-tokens", self.tool_tokens, 1)
        check_least("--new-tokens", self.new_tokens, 1)

    def script(self, rng: Random) -> Script:
        calls = [Segment(self.new_tokens, self.tool_seconds(rng), self.tool_tokens) for _ in range(self.turns - 1)]
        return Script("agent", self.prompt_tokens, (*calls, Segment(self.new_tokens, None, 0)))


def check(servers: Servers, style: Style, shape: SessionShape, json_path: str | None, plot_path: str | None) -> None:
    """Raise `ConfigError` for options that cannot work, before a server is started."""
    servers.check()
    shape.check()
    check_least("--system-tokens", style.system_tokens, 0)
    if style.vocabulary is not None:
        check_least("--token-ids", style.vocabulary, 1)
    check_outputs((("--json", json_path), ("--plot", plot_path)))
    if plot_path is not None:
        check_drawing(plot_path)


def bar(console: Console) -> Progress:
    """A progress display of counted work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def teller(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """Adds a line to a progress display; the result sets how much of it is done."""
    task = progress.add_task(what, total=total)
    return lambda done: progress.update(task, completed=done)


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
    raise ConfigError("--tool-seconds is not a number of seconds", got=text, fix=f"{FORMS}, in seconds")
