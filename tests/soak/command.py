"""`python -m tests.soak`: random clients, hostile tools, disconnects and kills on a server of its own; must lose nothing."""

import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.servers import Child, child_process
from jinfercept.sim.reports import check_outputs, write_json
from jinfercept.sim.tables import check_least, show
from tests.soak.model import TEMPLATE, write_model
from tests.soak.rounds import Plan, soak
from tests.soak.tally import FAILURES, Tally, percentile
from tests.soak.tools import write_tools

NAME = "soaked"
_ROUND_S = 30.0
_SMALL: Mapping[str, Any] = {"kv_tokens": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 256}
_TINY: Mapping[str, Any] = {"load_format": "dummy", "dtype": "float32", "swap_space": 0.0005}
"""A host pool of about 2,000 tokens of the tiny model."""
_SWAP_SPACE = 0.1


def soak_command(
    model: str | None,
    flags: Mapping[str, Any],
    *,
    minutes: float,
    clients: int,
    patience_s: float,
    seed: int,
    hostile: int,
    json_path: str | None,
) -> int:
    """Run the command.

    Args:
        model: as for `LLM`; None: a tiny random one, made on the fly.
        flags: options of the engine; without them both pools are small.
        minutes: of load; the checks take their time besides.
        clients, patience_s, seed, hostile: see `Plan`.
        json_path: a file to write.

    Returns:
        The exit status: 1 if anything was lost, hung, leaked or wrong.

    Raises:
        ConfigError: an option makes no sense, or the server does not start.
    """
    check_least("--minutes", minutes, 0.01)
    check_least("--clients", clients, 1)
    check_least("--patience", patience_s, 0.1)
    check_least("--hostile", hostile, 0)
    check_outputs((("--json", json_path),))
    mcp = importlib.util.find_spec("mcp") is not None
    seconds = 60.0 * minutes
    rounds = max(2, round(seconds / _ROUND_S))
    if hostile:
        rounds += rounds % 2
    keys = (token_hex(16), token_hex(16)) if hostile else None
    plan = Plan(rounds, seconds / rounds, clients, patience_s, seed, mcp, hostile, keys)
    tally, console = Tally(), Console(stderr=True)
    try:
        with _server(model, flags, plan, console) as child:
            with _progress(console, plan, tally) as told:
                asyncio.run(soak(child.url, child.process.pid, NAME, plan, tally, told))
            _read_log(child.log, tally)
        if child.process.returncode:
            tally.fail("lost", "server", f"it ended with status {child.process.returncode}")
    finally:  # what there is, also if interrupted
        if tally.visits:
            show(table(tally))
            print(verdict(tally))
            if tally.attacks:
                print(attacked(tally))
            print(*tally.failures, sep="\n", file=sys.stderr)
            if json_path is not None:
                write_json(json_path, {"plan": plan._replace(keys=None)._asdict()} | tally.as_json())
    return int(not tally.clean)


def table(tally: Tally) -> Table:
    """A row for each kind of visit."""
    columns = ("visits", "requests", "answered", "left", "refused", "checked", "ties", "rewritten")
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("tried")
    for name in (*columns, *FAILURES):
        shown.add_column(name, justify="right")
    for kind in dict.fromkeys((*sorted(tally.visits), *(kind for _, kind in tally.failed))):
        numbers = [getattr(tally, name)[kind] for name in columns]
        shown.add_row(kind, *map(str, numbers), *(str(tally.failed[failure, kind]) for failure in FAILURES))
    sums = [sum(getattr(tally, name).values()) for name in columns]
    shown.add_row("all", *map(str, sums), *(str(tally.total(failure)) for failure in FAILURES))
    return shown


def verdict(tally: Tally) -> str:
    """What was lost, in a line, and what the server held at the end."""
    more = f"; MCP server killed {tally.kills} times"
    if tally.holdings:
        more += f"; after {len(tally.holdings)} rounds held: " + ", ".join(
            f"{number} {name}" for name, number in tally.holdings[-1]._asdict().items()
        )
    return losses(tally) + more


def attacked(tally: Tally) -> str:
    """What hostile clients did, and what it did to the others."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(tally.attacks.items()))
    before, after = (number / 2**20 for number in tally.memory)
    memory = f"memory, idle: before {before:.0f} MiB, after {after:.0f} MiB ({after / before:.2f} x)"
    lines = [f"attacks: {tally.attacks.total()}: {kinds}", memory]
    ratio = tally.first_token_ratio
    if ratio is not None:
        shown = [
            f"{name} p50 {percentile(values, 50):.3f} s, p99 {percentile(values, 99):.3f} s ({len(values)} streams)"
            for name, values in zip(("alone", "attacked"), tally.first_token_s, strict=True)
        ]
        lines.append(f"first token of the others: {', '.join(shown)}; p99 ratio {ratio:.2f}")
    return "\n".join(lines)


def losses(tally: Tally) -> str:
    """Failures by kind."""
    return ", ".join(f"{tally.total(failure)} {failure}" for failure in FAILURES)


def _read_log(log: Path, tally: Tally) -> None:
    """What a server writes of itself when it has failed, even if no client saw it."""
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        first = text[text.index("Traceback") :].partition("\n\n")[0]
        tally.fail("lost", "server", f"it logged {text.count('Traceback (')} errors, the first: {first[:2000]}")


@contextmanager
def _server(model: str | None, flags: Mapping[str, Any], plan: Plan, console: Console) -> Iterator[Child]:
    """A server with hostile tools and small pools, which checks its pages after every step."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            write_model(Path(folder))
        small = {**_SMALL, **(_TINY if model is None else {"swap_space": _SWAP_SPACE})}
        tools = write_tools(Path(folder), mcp=plan.mcp)
        own: dict[str, Any] = {"served_model_name": NAME, "tools": tools}
        own["check_pages"] = not plan.hostile  # it takes most of a step's time, which is measured then
        if plan.keys is not None:
            file = Path(folder) / "keys.toml"
            tables = (
                f'[{name}]\nkey = "{key}"\n' for name, key in zip(("ordinary", "hostile"), plan.keys, strict=True)
            )
            file.write_text("".join(tables), encoding="utf-8")
            own["api_key_file"] = str(file)
        if model is not None:  # whose own template may know no tools
            template = Path(folder) / "template.jinja"
            template.write_text(TEMPLATE, encoding="utf-8")
            own["chat_template"] = str(template)
        with (
            console.status("starting the server") as status,
            child_process(model or folder, {**small, **own, **flags}) as it,
        ):
            status.stop()
            yield it


class _Display(NamedTuple):
    """A bar, and a line for each round."""

    shown: Progress
    task: TaskID
    plan: Plan
    tally: Tally

    def doing(self, what: str, done_s: float) -> None:
        self.shown.update(self.task, description=what, completed=done_s)

    def over(self, number: int) -> None:
        requests = sum(self.tally.requests.values())
        print(f"round {number} of {self.plan.rounds}: {requests} requests, {losses(self.tally)}", flush=True)


@contextmanager
def _progress(console: Console, plan: Plan, tally: Tally) -> Iterator[_Display]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        yield _Display(shown, shown.add_task("load", total=plan.rounds * plan.round_s), plan, tally)
