"""A small model whose calls run while it writes, beside the same model that waits for each of them.

Both answer the same questions at the same time, in one batch. Under the text of each, a lane for the model shows when it waits,
and a lane for every call shows when it runs. The model reads in the first line of a prompt how it is to call.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jinfercept.calls import Tool
from jinfercept.cli.options import Maybe
from jinfercept.config import EngineOptions
from jinfercept.events import Event, Finished, Intercepted, Interrupted, Resumed, Token
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.reports import plain_table
from jinfercept.start.progress import StartDisplay

if TYPE_CHECKING:
    from jinfercept.llm import LLM

Mode = Literal["async", "sync"]

CHECKPOINT = Path(__file__).with_name("checkpoint")
QUESTIONS = """\
- p: price: lamp
- q: shelf: kettle
- r: age: violin
- s: add: 48 + 17
- t: total: p + s
"""
ANSWERS = {("price", "lamp"): 23, ("shelf", "kettle"): 7, ("age", "violin"): 92}
SHARES = {"price": 0.7, "shelf": 0.5, "age": 1.0, "add": 0.3, "total": 0.3}
"""Seconds that the tools take, as shares of the slowest one's."""
LANE = 48
"""Characters of a lane."""
SHOWN_LINES = 6
"""Lines of the text that are shown while it is written."""


class Span(NamedTuple):
    """Seconds since the start at which something began and ended; None: it has not ended."""

    began_s: float
    ended_s: float | None = None


@dataclass
class Lanes:
    """What one request has done so far. Its tools write into it too, from threads of their own.

    Attributes:
        text: what it wrote, with the interrupts.
        waits: when it waited for calls.
        calls: when each call ran, by its code.
        results: of the calls that have ended, by their code.
        output: what it has produced; None before its end.
        ended_s: when it ended.
    """

    began_s: float
    text: Text = field(default_factory=Text)
    waits: list[Span] = field(default_factory=list)
    calls: dict[str, Span] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    output: RequestOutput | None = None
    ended_s: float | None = None

    @property
    def now_s(self) -> float:
        """Seconds since the start; those of the end, if it has come."""
        return time.monotonic() - self.began_s if self.ended_s is None else self.ended_s

    def note(self, event: Event) -> None:
        """Take an event of the request."""
        match event:
            case Token(text=text):
                self.text.append(text)
            case Interrupted(text=text):
                self.text.append(text, style="cyan")
            case Intercepted():
                self.waits.append(Span(self.now_s))
            case Resumed(text=text):
                self.text.append(text, style="cyan")
                self.waits[-1] = self.waits[-1]._replace(ended_s=self.now_s)
            case Finished(output=output):
                self.output, self.ended_s = output, self.now_s
            case _:
                pass

    def run(self, code: str, seconds: float, compute: Callable[[], int]) -> int:
        """A call that takes its time."""
        self.calls[code] = Span(self.now_s)
        time.sleep(seconds)
        value = compute()
        self.calls[code], self.results[code] = self.calls[code]._replace(ended_s=self.now_s), str(value)
        return value


def tools(lanes: Lanes, slow_s: float) -> list[Tool]:
    """The tools of one request."""

    def add(first: int, second: int) -> int:
        """The sum of two numbers."""
        return lanes.run(f"add({first}, {second})", slow_s * SHARES["add"], lambda: first + second)

    def total(p: int = 0, q: int = 0, r: int = 0, s: int = 0) -> int:
        """The total of answers, which have the ids of their questions."""
        terms = {id_: value for id_, value in zip("pqrs", (p, q, r, s), strict=True) if value}
        code = ", ".join(f"{id_}={value}" for id_, value in terms.items())
        return lanes.run(f"total({code})", slow_s * SHARES["total"], lambda: sum(terms.values()))

    def lookup(name: str) -> Tool:
        def look(item: str) -> int:
            """Looks something up about an item."""
            return lanes.run(f"{name}({item})", slow_s * SHARES[name], lambda: ANSWERS[name, item])

        return Tool(look, name=name, calls="async")

    return [Tool(add, calls="async"), Tool(total, calls="async"), *(lookup(name) for name, _ in ANSWERS)]


@dataclass(frozen=True)
class Demo:
    """The command."""

    model: Maybe[str] = None
    """a directory that `train` wrote (default: the one beside this file)"""
    slow_s: float = 1.5
    """seconds that the slowest tool takes"""

    def run(self) -> int:
        """Show both kinds of calls, and print their times and answers; 0 if the answers are the same."""
        from jinfercept.llm import LLM

        console = Console()
        sizes: EngineOptions = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64}
        with StartDisplay(notes=True) as start, LLM(self.model or str(CHECKPOINT), progress=start, **sizes) as llm:
            start.close()
            _serve(llm, {mode: Lanes(time.monotonic()) for mode in get_args(Mode)}, 0.0)  # imports what declares tools
            lanes: dict[Mode, Lanes] = {mode: Lanes(time.monotonic()) for mode in get_args(Mode)}
            full_s = 1.5 * self.slow_s * sum(SHARES.values())
            with Live(console=console, get_renderable=lambda: picture(lanes, full_s), refresh_per_second=15):
                _serve(llm, lanes, self.slow_s)
        console.print()
        console.print(_table(lanes))
        same = len({_answer(own_lanes) for own_lanes in lanes.values()}) == 1
        console.print("the same answers" if same else "[red]different answers[/red]")
        return 0 if same else 1


def _serve(llm: "LLM", lanes: Mapping[Mode, Lanes], slow_s: float) -> None:
    """Both requests at once, each with tools of its own."""
    params = SamplingParams(temperature=0.0, max_tokens=512, skip_special_tokens=False)

    def serve_mode(mode: Mode) -> None:
        prompt = f"Calls: {mode}\n{QUESTIONS}\n"
        llm.generate(prompt, params, tools=tools(lanes[mode], slow_s), on_event=lanes[mode].note)

    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(serve_mode, lanes))


def picture(lanes: Mapping[Mode, Lanes], full_s: float) -> RenderableType:
    """All requests; a full lane is `full_s` seconds long."""
    return Group(*(part for mode, own_lanes in lanes.items() for part in _request_picture(mode, own_lanes, full_s)))


def _request_picture(mode: Mode, lanes: Lanes, full_s: float) -> tuple[RenderableType, ...]:
    """The text of a request above its lanes."""
    title = Text(f"\n{mode}hronous calls  {lanes.now_s:.1f} s", style="bold green" if lanes.ended_s else "bold")
    lines = lanes.text.copy().split("\n")
    grid = Table.grid(padding=(0, 1))
    states = [Span(0.0, lanes.ended_s), *lanes.waits]
    grid.add_row("model", _lane(states, "█░", lanes.now_s, full_s), "")
    for code, span in list(lanes.calls.items()):
        grid.add_row(code, _lane([span], "━", lanes.now_s, full_s), lanes.results.get(code, "…"))
    return title, Text("\n").join(lines if lanes.ended_s else lines[-SHOWN_LINES:]), grid


def _lane(spans: list[Span], marks: str, now_s: float, full_s: float) -> str:
    """Spans drawn over each other, the first with the first mark and the others with the last."""
    cells = [" "] * LANE
    for number, (began_s, ended_s) in enumerate(spans):
        ends = (min(LANE, round(LANE * at_s / full_s)) for at_s in (began_s, now_s if ended_s is None else ended_s))
        for cell in range(*ends):
            cells[cell] = marks[min(number, len(marks) - 1)]
    return "".join(cells)


def _answer(lanes: Lanes) -> str:
    """The lines behind the calls."""
    return "" if lanes.output is None else lanes.output.outputs[0].text.rpartition("\n- p: ")[2]


def _table(lanes: Mapping[Mode, Lanes]) -> Table:
    """Times and numbers of both requests."""
    table = plain_table(("calls", "seconds", "of them waiting", "tokens", "faster"), left=("calls",))
    slowest_s = max(own_lanes.now_s for own_lanes in lanes.values())
    for mode, own_lanes in lanes.items():
        waited_s = sum((wait.ended_s or own_lanes.now_s) - wait.began_s for wait in own_lanes.waits)
        tokens = 0 if own_lanes.output is None else own_lanes.output.outputs[0].num_generated
        table.add_row(
            mode, f"{own_lanes.now_s:.2f}", f"{waited_s:.2f}", str(tokens), f"{slowest_s / own_lanes.now_s:.2f} ×"
        )
    return table
