"""`jinfercept demo`: SmolLM2 solves word problems with a calculator and a slow price list, under every policy.

The examples in the prompt teach the model to write `<<48/2=`, which calls the calculator, and `<<price pencil=`, which asks a
slow shop. All problems run together in a KV pool that is too small for them, so paused contexts compete for memory.
"""

import ast
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jinfercept.calls import Tool
from jinfercept.errors import ConfigError
from jinfercept.events import Event, Finished
from jinfercept.models.embedded import NAME
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sim.reports import plain_table
from jinfercept.start.progress import StartDisplay

if TYPE_CHECKING:
    from jinfercept.llm import LLM

POLICIES = ("discard", "improved_discard", "preserve", "swap", "min_waste", "copy_ahead")
KV_TOKENS = 960
PRICES = {
    "pencil": 3,
    "notebook": 5,
    "book": 14,
    "cake": 12,
    "lamp": 23,
    "bicycle": 180,
    "eraser": 2,
    "ticket": 16,
    "chair": 45,
    "candle": 4,
    "shirt": 18,
    "plant": 9,
}

EXAMPLES = """\
Q: How much do 6 pencils cost?
A: One pencil costs <<price pencil=3>>3 dollars. So 6 pencils cost 6*3 = <<6*3=18>>18 dollars. The answer is 18.

Q: Ben had 53 marbles and lost 17. How many are left?
A: He has 53-17 = <<53-17=36>>36 marbles left. The answer is 36.

Q: Mia buys 4 notebooks. What does she pay?
A: One notebook costs <<price notebook=5>>5 dollars. So 4 notebooks cost 4*5 = <<4*5=20>>20 dollars. The answer is 20.

"""

QUESTIONS = (
    "How much do 7 books cost?",
    "Sam had 64 cards and lost 19. How many are left?",
    "Ann buys 9 cakes. What does she pay?",
    "Sara reads 24 pages a day for 7 days. How many pages does she read?",
    "How much do 12 lamps cost?",
    "A train has 12 cars with 35 seats each. How many seats are there?",
    "Leo buys 3 bicycles. What does he pay?",
    "How much do 15 erasers cost?",
    "Paul had 81 stamps and gave away 36. How many stamps are left?",
    "Nina buys 8 tickets. What does she pay?",
    "How much do 5 chairs cost?",
    "Each of 6 shelves holds 25 jars. How many jars are there?",
    "Eva buys 11 candles. What does she pay?",
    "How much do 4 shirts cost?",
    "A bus has 42 people and 18 get off. How many people are left?",
    "Tim buys 6 plants. What does he pay?",
)

_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class DemoRun(NamedTuple):
    outputs: list[RequestOutput]
    counters: SchedulerCounters
    seconds: float


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression such as `48/2`."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(int() | float() as number):
                return number
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError("the calculator knows only + - * / and numbers")

    result = value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(result)) if float(result).is_integer() else f"{result:.2f}"


def shop(seconds: float) -> Callable[[str], str]:
    """Make a price list that answers after some seconds."""

    def price(item: str) -> str:
        time.sleep(seconds)
        return str(PRICES[item.strip().lower()])

    return price


def prompts(number: int) -> list[str]:
    """Put word problems after the same examples. The first line differs, so that no context can share another's pages."""
    return [f"Sheet {i + 1}\n\n{EXAMPLES}Q: {QUESTIONS[i % len(QUESTIONS)]}\nA:" for i in range(number)]


@dataclass(frozen=True)
class Demo:
    requests: int = 12
    """word problems"""
    slow_s: float = 1.5
    """seconds that the slow tool takes"""
    show: int = 2
    """answers to print"""

    def run(self) -> int:
        """Run the demo; returns 0 if every policy gave the same answers."""
        if self.requests < 1:
            raise ConfigError("--requests must be at least 1", got=self.requests, fix="--requests 14")
        console = Console()
        runs = _run_all(self.requests, self.slow_s, console)
        reference = next(iter(runs.values())).outputs
        for output in reference[: self.show]:
            question = (output.prompt or "").rsplit("Q: ", 1)[-1].removesuffix("\nA:")
            console.print(f"[bold]{escape(question)}[/bold]{escape(output.outputs[0].text)}")
        console.print(_table(runs))
        different = [
            f"{name}: request {i}"
            for name, run in runs.items()
            for i, (ours, other) in enumerate(zip(run.outputs, reference, strict=True))
            if ours.outputs[0].token_ids != other.outputs[0].token_ids
        ]
        if different:
            console.print(f"[red]different tokens[/red] than under {next(iter(runs))}: {', '.join(different)}")
            return 1
        console.print("identical tokens under all policies")
        return 0


def _run_all(num_requests: int, slow_s: float, console: Console) -> dict[str, DemoRun]:
    from jinfercept.llm import LLM

    with (
        StartDisplay(notes=True) as display,
        LLM(
            NAME,
            dtype="float32",
            kv_tokens=KV_TOKENS,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            lazy=False,
            progress=display,
        ) as llm,
    ):
        display.close()
        return {name: _run(llm, name, num_requests, slow_s, console) for name in POLICIES}


def _run(llm: "LLM", policy: str, num_requests: int, slow_s: float, console: Console) -> DemoRun:
    llm.restart(policy=policy)
    tools = [
        Tool(calculator, start="<<", stop="=", result="{}>>"),
        Tool(shop(slow_s), name="price", start="<<price ", stop="=", result="{}>>"),
    ]
    columns = (
        TextColumn("{task.description:>17}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(policy, total=num_requests)

        def show(event: Event) -> None:
            if isinstance(event, Finished):
                progress.advance(task)

        started = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=64, stop="\n\n")
        outputs = llm.generate(prompts(num_requests), params, tools=tools, on_event=show)
    return DemoRun(outputs, llm.counters, time.monotonic() - started)


def _table(runs: dict[str, DemoRun]) -> Table:
    columns = ("policy", "requests", "calls", "generated", "recomputed", "copied\nout", "copied\nin", "seconds")
    table = plain_table(columns, left=("policy",), title=f"{NAME} in float32, KV pool of {KV_TOKENS:,} tokens")
    for name, run in runs.items():
        completions = [output.outputs[0] for output in run.outputs]
        counts = (
            len(run.outputs),
            sum(len(pause.calls) for completion in completions for pause in completion.interceptions),
            sum(completion.num_generated for completion in completions),
            run.counters.recomputed,
            run.counters.copied_out,
            run.counters.copied_in,
        )
        table.add_row(name, *(f"{count:,}" for count in counts), f"{run.seconds:.1f}")
    return table
