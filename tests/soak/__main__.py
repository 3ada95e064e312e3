"""`python -m tests.soak`: random clients, hostile tools, disconnects and kills on a server of its own; must lose nothing."""

import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro import conf

from benchmarks.servers import Child, child_process
from jinfercept.cli.command import run_command
from jinfercept.cli.options import Maybe, engine_flags, parse
from jinfercept.config import EngineOptions
from jinfercept.sim.reports import check_least, check_outputs, show, write_json
from tests.soak.model import write_model
from tests.soak.rounds import Plan, soak
from tests.soak.tally import FAILURES, Tally
from tests.soak.tools import write_tools
from tests.support.chat_templates import QWEN

PROG = "python -m tests.soak"
DESCRIPTION = "Random clients, hostile tools, disconnects, kills: nothing may be lost, hang, leak or be wrong."
NAME = "soaked"
_ROUND_S = 30.0
_SMALL: Mapping[str, Any] = {"kv_tokens": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 256}
_TINY: Mapping[str, Any] = {"load_format": "dummy", "dtype": "float32", "swap_space": 0.0005}
"""A host pool of about 2,000 tokens of the tiny model."""
_SWAP_SPACE = 0.1


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The command."""

    model: Annotated[conf.Positional[str | None], conf.arg(metavar="[MODEL]", help_behavior_hint="")] = None
    """as for `jinfercept serve` (default: a tiny random one)"""
    minutes: float = 10.0
    """of load; the checks come besides"""
    clients: int = 12
    """at a time"""
    patience: float = 60.0
    """seconds without a byte after which a request counts as hung"""
    seed: int = 0
    """of everything that clients do"""
    json: Maybe[str] = None
    """write everything to this file"""
    engine: Annotated[EngineOptions, engine_flags("seed")]

    def run(self) -> int:
        """Run the soak; returns the exit status: 1 if anything was lost, hung, leaked or wrong.

        Raises:
            ConfigError: an option makes no sense, or the server does not start.
        """
        check_least("--minutes", self.minutes, 0.01)
        check_least("--clients", self.clients, 1)
        check_least("--patience", self.patience, 0.1)
        check_outputs((("--json", self.json),))
        mcp = importlib.util.find_spec("mcp") is not None
        seconds = 60.0 * self.minutes
        rounds = max(2, round(seconds / _ROUND_S))
        plan = Plan(rounds, seconds / rounds, self.clients, self.patience, self.seed, mcp)
        tally, console = Tally(), Console(stderr=True)
        try:
            with _server(self.model, self.engine, plan, console) as child:
                asyncio.run(soak(child.url, child.process.pid, NAME, plan, tally))
                _read_log(child.log, tally)
            if child.process.returncode:
                tally.fail("lost", "server", f"it ended with status {child.process.returncode}")
        finally:  # what there is, also if interrupted
            if tally.visits:
                show(table(tally))
                print(verdict(tally))
                print(*tally.failures, sep="\n", file=sys.stderr)
                if self.json is not None:
                    write_json(self.json, {"plan": plan._asdict()} | tally.as_json())
        return int(not tally.clean)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status, as `jinfercept` does."""
    return run_command(parse(Soak, PROG, DESCRIPTION, sys.argv[1:] if argv is None else argv), PROG)


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
    return tally.losses() + more


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
        own: dict[str, Any] = {"served_model_name": NAME, "tools": tools, "check_pages": True}
        if model is not None:  # whose own template may know no tools
            template = Path(folder) / "template.jinja"
            template.write_text(QWEN, encoding="utf-8")
            own["chat_template"] = str(template)
        with (
            console.status("starting the server") as status,
            child_process(model or folder, {**small, **own, **flags}) as it,
        ):
            status.stop()
            yield it


if __name__ == "__main__":
    sys.exit(main())
