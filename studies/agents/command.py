"""`python -m studies agents`: coding agents under policies, published rivals and orders of waiting requests."""

import os
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from rich.console import Console
from tyro import conf

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.errors import ConfigError
from jinfercept.sched.door import Overload
from jinfercept.sim.agent_sessions import load_sessions
from jinfercept.sim.reports import check_least, listed, numbers
from studies.agents.cells import MODELS, ORDERS, POLICIES, AgentCell, contenders, play, search
from studies.agents.report import matrix_answer, search_answer
from studies.answer import FinishedRuns, StudyEffort, output_folder


@dataclass(frozen=True)
class StudyAgents:
    """The command."""

    trace: str = "agents"
    """sessions of agents, a file of any form (docs/studies.md); agents: those that ship with the package"""
    within_limits: Switch = False
    """search the most live sessions of which 95 % of the turns keep the limits, in place of --device"""
    model: Several = ()
    """parts of the models' titles (default: 8B, H100)"""
    device: Several = ()
    """device pools over the contexts of the live sessions (default: 0.15,0.33)"""
    host: Several = ()
    """host pools over the device pool (default: 1)"""
    contender: Annotated[
        Several,
        conf.arg(
            help=f"policies under an order, as lru_host+missing_work; a policy alone is under all that it admits. Policies: "
            f"{', '.join(POLICIES)}; orders: {', '.join(ORDERS)}; or your own as path.py:Class (default: all)"
        ),
    ] = ()
    overload: Annotated[
        tuple[Overload, ...], conf.UseAppendAction, conf.arg(help_behavior_hint="(default: serve)")
    ] = ()
    """new sessions for which there is no room: they wait at the door (docs/serving.md), are refused and come again, or are
    served; may be repeated"""
    seeds: int = 1
    """of the sessions"""
    duration: float = 900.0
    """seconds of each run"""
    seed: int = 0
    """the first seed"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    out: Maybe[str] = None
    """folder to write a page, a CSV file and, of a search, a picture to; made if it does not exist. Its agents.jsonl keeps the
    runs that have finished: the same command goes on from there after Ctrl-C, and other cells and seeds are added to them.
    Remove it after a change of the code"""

    def run(self) -> int:
        """Play the cells, and print tables and findings; returns 0, or 130 after Ctrl-C.

        Raises:
            ConfigError: the options make no sense, or a run failed.
        """
        check_least("--jobs", self.jobs, 1)
        check_least("--seeds", self.seeds, 1)
        check_least("--duration", self.duration, 1.0)
        cells, compared = self.cells(), contenders(listed(self.contender))
        sessions = load_sessions(self.trace)
        folder = None if self.out is None else output_folder(self.out, ("agents.md", "agents.png", "agents.csv"))
        finished = None if folder is None else FinishedRuns(folder / "agents.jsonl")
        effort = StudyEffort(False, self.jobs, self.seed, Console(stderr=True), finished=finished)
        run = (effort, sessions, cells, compared, self.seeds, self.duration)
        try:
            study = search_answer(search(*run)) if self.within_limits else matrix_answer(play(*run))
        except KeyboardInterrupt:
            return 130
        study.show()
        if folder is not None:
            print(f"\nwritten: {', '.join(map(str, study.write(folder, 'agents')))}")
        return 0

    def cells(self) -> list[AgentCell]:
        """The cells to play. Raises `ConfigError` for a pool that is no number above 0, or a model that there is not."""
        parts = listed(self.model) or ("8B, H100",)
        models = [model for model in MODELS if any(part in model.title for part in parts)]
        if not models:
            titles = "; ".join(model.title for model in MODELS)
            raise ConfigError("no such model", got=", ".join(self.model), fix=f"a part of one of {titles}")
        hosts = numbers("--host", self.host or ("1",), float)
        check_least("--host", min(hosts), 0.0)
        if self.within_limits:
            if self.device or self.overload:
                got = f"--device {', '.join(self.device)} --overload {', '.join(self.overload)}"
                fix = "leave them out: as many sessions are searched as need no door"
                raise ConfigError("--within-limits cannot be combined with --device or --overload", got=got, fix=fix)
            return [AgentCell(*cell) for cell in product(models, (None,), hosts)]
        devices = numbers("--device", self.device or ("0.15,0.33",), float)
        check_least("--device", min(devices), 0.01)
        return [AgentCell(*cell) for cell in product(models, devices, hosts, self.overload or ("serve",))]
