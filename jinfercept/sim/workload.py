"""Scripts of requests: generated tokens, calls with their seconds, returned tokens; and their arrivals, a Poisson process.

Scripts are loaded from a trace, generated for the six kinds of the InferCept paper (arXiv 2402.01869), or drawn by a user's own
code, which is checked. Only counts and seconds: no text, no token ids.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from jinfercept.errors import ConfigError, describe_failure, shown
from jinfercept.sched.plugins import build_plugin, label, source_line


class LogNormal(NamedTuple):
    """A log-normal distribution, clipped to [low, high]."""

    median: float  # before clipping
    between: float = 0.0  # standard deviation of the logarithm from request to request
    within: float = 0.0  # the same among the values of one request
    low: float = 0.0
    high: float = math.inf

    def at(self, request: float, value: float) -> float:
        """The value that belongs to two standard normal numbers: one of the request, one of the value itself."""
        return min(self.high, max(self.low, self.median * math.exp(self.between * request + self.within * value)))


class TurnDistributions(NamedTuple):
    """Tokens that are generated, the call after them in seconds, and the tokens that come back."""

    decode: LogNormal
    call_s: LogNormal
    returned: LogNormal
    # a person answers: a long reply takes long to write, so that `call_s` and `returned` are drawn together (correlation of
    # their logarithms in the trace: 0.91)
    typed: bool = False


@dataclass(frozen=True, slots=True)
class KindDistributions:
    """The distributions of one kind of request."""

    prompt: LogNormal
    rounds: LogNormal  # number of passes through the turns
    turns: tuple[TurnDistributions, ...]
    answer: LogNormal | None  # tokens generated after the last call; None: the request ends one token after it
    split: bool = False  # `decode` and `answer` are of the whole request, and are divided by its number of segments


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
    # a chat in which a program makes something of every text before the person replies, as in the trace
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


MIXED_WEIGHTS: Mapping[str, float] = {"math": 98, "qa": 50, "ve": 54, "chat": 65, "image": 65, "tts": 65}
"""Requests of each kind in the authors' mixed trace."""

PAPER_TRACE = Path(__file__).with_name("paper_trace.jsonl")
"""Lengths and seconds of the 397 requests of the InferCept authors' mixed trace, from a public copy under Apache-2.0
(mars-repository/mars-codebase)."""

WINDOW = 2048
"""Tokens of the longest request that is generated."""

MOST_TOKENS = 1_000_000_000
"""Limit on a number of tokens in a trace."""


class Segment(NamedTuple):
    """A piece of a request up to its next call."""

    decode: int  # tokens that the model generates, at least 1
    call_s: float | None  # seconds of the call after them; None: no call, the request ends; infinity: it never returns
    returned: int  # tokens that come back
    tool: str | None = None  # name of the call's tool; None: the request's kind


class Script(NamedTuple):
    """One request: the tokens of its prompt, then its segments. All but the last segment have a call."""

    kind: str
    prompt: int
    segments: tuple[Segment, ...]
    tenant: str = ""

    @property
    def generated(self) -> int:
        return sum(segment.decode for segment in self.segments)

    @property
    def output_paper(self) -> int:
        """Output tokens as the paper counts them: generated and returned."""
        return self.generated + sum(segment.returned for segment in self.segments)

    @property
    def context(self) -> int:
        """Tokens at the end, the prompt included."""
        return self.prompt + self.output_paper

    @property
    def calls(self) -> int:
        return len(self.segments) - 1


def load_trace(path: str | Path) -> list[Script]:
    """The requests of a trace, in its order; `paper` is the authors' mixed trace, which ships with the package.

    A line of the file is a request: `{"kind": text, "prompt": tokens, "segments": [{"decode": tokens, "call_s": seconds,
    "returned": tokens}, …]}`. The last segment may lack a call. If it has one, a segment of one token is appended: the
    request ends one token after the call has returned.

    Raises:
        ConfigError: no such file, no requests in it, or a line that lacks a part of this.
    """
    path = PAPER_TRACE if path == "paper" else path
    scripts = [_script(entry, where) for where, entry in trace_objects(Path(path)).items()]
    if not scripts:
        raise ConfigError("the trace has no requests", got=path, fix="write one request a line")
    return scripts


def trace_objects(path: Path) -> dict[str, dict[str, Any]]:
    """The JSON objects of a file, one or one a line, by their places. Raises `ConfigError` for a file that has others."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the trace cannot be read", got=f"{path} ({error})", fix="name a file of JSON") from None
    try:
        entries = {str(path): json.loads(text)}
    except (ValueError, RecursionError):
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1))
        entries = {where: _parsed(line, where) for where, line in lines if line.strip()}
    for where, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: this is not a JSON object", got=reprlib.repr(entry), fix="write JSON objects")
    return entries


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON", got=error, fix="write one JSON object a line") from None


def _script(entry: Mapping[str, Any], where: str) -> Script:
    fix = '{"kind": text, "prompt": tokens, "segments": [{"decode": tokens, "call_s": seconds, "returned": tokens}, …]}'
    with reading(where, entry, fix):
        segments = list[Segment]()
        for part in entry["segments"]:
            call_s = part.get("call_s")
            segments.append(Segment(part["decode"], None if call_s is None else float(call_s), part.get("returned", 0)))
        if segments and segments[-1].call_s is not None:
            segments.append(Segment(1, None, 0))
        script = Script(entry["kind"], entry["prompt"], tuple(segments))
        if problem := problem_of(script):
            raise ValueError(problem)
        return script


@contextmanager
def reading(where: str, entry: object, fix: str) -> Iterator[None]:
    """Make a `ConfigError` with the place of an entry of a trace of whatever reading it raises."""
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{where} cannot be read: {missing}", got=reprlib.repr(entry), fix=fix) from None


def checked_number(value: Any) -> float:
    """A number from a trace, from 0 to `MOST_TOKENS`. Raises `ValueError` or `TypeError` for any other value."""
    if isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"{reprlib.repr(value)} is no number from 0 to {MOST_TOKENS:,}")
    return value


def problem_of(script: object) -> str:
    """Why a script cannot be played; "" if it can."""
    if not isinstance(script, Script) or not isinstance(script.kind, str):
        return "no Script"
    if not _is_count(script.prompt, 1):
        return f"a prompt of no tokens from 1 to {MOST_TOKENS:,}"
    if not script.segments or not all(map(_is_playable, script.segments)):
        return "a segment that generates nothing, returns no number of tokens, or whose call lasts no time"
    calls = [segment.call_s is not None for segment in script.segments]
    if calls != [True] * (len(calls) - 1) + [False]:
        return "segments of which not exactly the last has no call"
    return ""


def _is_playable(segment: object) -> bool:
    if not isinstance(segment, Segment) or not _is_count(segment.decode, 1) or not _is_count(segment.returned, 0):
        return False
    call_s = segment.call_s
    return call_s is None or (not isinstance(call_s, bool) and isinstance(call_s, int | float) and call_s >= 0)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_TOKENS


def from_trace(scripts: Sequence[Script], rng: Random) -> Callable[[], Script]:
    """A draw from scripts, with replacement."""
    return lambda: rng.choice(scripts)


def generate(kind: str, rng: Random) -> Script:
    """A request of one kind, with the statistics of the authors' mixed trace. Raises `ConfigError` if there is no such kind.

    Every quantity is a clipped log-normal with a part that is common to the request (its pace, its wordiness) and a part of
    each value. The window then cuts the request: the segment that reaches it is the last, a result is cut to leave room for
    one token, and a prompt too. Two properties differ from the trace: contexts of conversations spread a little more (in the
    trace, long prompts come with short conversations), and returned tokens of `ve` less.
    """
    if kind not in DISTRIBUTIONS:
        raise ConfigError(
            "no such kind of request", got=shown(kind), fix=f"mixed, or one of {', '.join(DISTRIBUTIONS)}"
        )
    fit = DISTRIBUTIONS[kind]
    prompt = min(_tokens(fit.prompt, rng.gauss(), 0.0), WINDOW - 1)
    rounds = _tokens(fit.rounds, rng.gauss(), 0.0)
    share = 1 / (rounds * len(fit.turns) + 1) if fit.split else 1.0
    wordy, paces = rng.gauss(), [(rng.gauss(), rng.gauss()) for _ in fit.turns]
    room, segments = WINDOW - prompt, []
    for turn, (pace, size) in list(zip(fit.turns, paces, strict=True)) * rounds:
        decode = _tokens(turn.decode, wordy, rng.gauss(), share)
        if decode >= room:
            break
        delay, amount = rng.gauss(), rng.gauss()
        returned = turn.returned.at(*((pace, delay) if turn.typed else (size, amount)))
        segments.append(Segment(decode, turn.call_s.at(pace, delay), min(round(returned), room - decode - 1)))
        room -= decode + segments[-1].returned
    else:
        decode = _tokens(fit.answer, wordy, rng.gauss(), share) if fit.answer else 1
    return Script(kind, prompt, (*segments, Segment(min(decode, room), None, 0)))


def _tokens(distribution: LogNormal, request: float, value: float, share: float = 1.0) -> int:
    return max(1, round(distribution.at(request, value) * share))


def draw(workload: str, rng: Random, weights: Mapping[str, float] = MIXED_WEIGHTS) -> Script:
    """A request of one kind, or of the "mixed" kinds by their weights. Raises `ConfigError` as `generate`."""
    return generate(rng.choices(list(weights), list(weights.values()))[0] if workload == "mixed" else workload, rng)


MOST_ARRIVALS = 1_000_000
"""Limit on the expected arrivals of a run, since all of them are in memory."""


class Arrival(NamedTuple):
    """A request, and the second at which it arrives, counted from the start of the run."""

    at_s: float
    script: Script


def arrivals(draw: Callable[[], Script], rate: float, duration_s: float, rng: Random) -> list[Arrival]:
    """The arrivals of `duration_s` seconds, in order; there may be none. Raises `ConfigError` as `arrival_times`."""
    # each request is drawn after its time
    return [Arrival(at_s, draw()) for at_s in arrival_times(rate, duration_s, rng)]


def arrival_times(rate: float, duration_s: float, rng: Random) -> Iterator[float]:
    """The seconds below `duration_s` at which requests arrive, at a rate per second, in order, each drawn when it is asked
    for.

    Raises `ConfigError` unless both are above 0 and bring at most `MOST_ARRIVALS`.
    """
    for name, value in (("rate", rate), ("duration_s", duration_s)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} of arrivals is out of range", got=value, fix="a finite number above 0")
    if rate * duration_s > MOST_ARRIVALS:
        got, fix = f"{rate:g} requests/s for {duration_s:g} s", f"at most {MOST_ARRIVALS:,}, rate times duration"
        raise ConfigError("too many requests would arrive", got=got, fix=fix)
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        yield at_s
        at_s += rng.expovariate(rate)


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
            problem = problem_of(script)
            if not problem and script.context >= self.max_model_len:
                problem = f"a request of {script.context} tokens, where fewer than {self.max_model_len} fit"
            if problem:
                fix = "Script(kind, prompt, (Segment(decode, call_s, returned), …, Segment(decode, None, 0)))"
                raise ConfigError(f"the workload {name} draws {problem}", got=f"{script!r:.200}", fix=fix)
            return script

        return drawn
