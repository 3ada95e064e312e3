"""`python -m studies agents`: turns of coding agents under policies and published rivals, over pools, models and seeds."""

import os
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from rich.console import Console
from tyro import conf

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import check_policies
from jinfercept.errors import ConfigError, nearest
from jinfercept.sim.tables import check_least, listed, numbers
from jinfercept.sim.trace_files import load_sessions
from studies.agents.cells import CONTENDERS, MODELS, AgentCell, Contender, play
from studies.agents.report import answer
from studies.answer import FinishedRuns, StudyEffort, output_folder

SHORT_DEVICES, SHORT_HOSTS = (0.15, 0.3), (1.0,)
DEVICES, HOSTS = (0.1, 0.2, 0.3, 0.5, 1.0), (0.0, 0.5, 1.0, 2.0, 4.0)
SHORT_S, FULL_S = 900.0, 3600.0
FULL_SEEDS = 5


@dataclass(frozen=True)
class StudyAgents:
    """The command."""

    trace: str = "agents"
    """sessions of agents, a JSON line each (docs/studies.md); agents: those that ship with the package"""
    full: Switch = False
    """all cells of the grid, an hour and five seeds each: hours; else two cells, a quarter of an hour of one seed"""
    model: Several = ()
    """parts of the models' titles (default: 8B; with --full all)"""
    device: Several = ()
    """device pools over the contexts of the live sessions (default: 0.15,0.3; with --full 0.1,0.2,0.3,0.5,1)"""
    host: Several = ()
    """host pools over the device pool (default: 1; with --full 0,0.5,1,2,4)"""
    disk: float = 0.0
    """disk tier over the device pool, for all contenders but the bound; 0: none"""
    contender: Annotated[Several, conf.arg(help=f"{', '.join(it.title for it in CONTENDERS)} (default: all)")] = ()
    policy: Several = ()
    """policies to compare too, by name or as package.module:Class"""
    seeds: Maybe[int] = None
    """of the sessions"""
    duration: Maybe[float] = None
    """seconds of each run"""
    seed: int = 0
    """the first seed"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    out: Maybe[str] = None
    """folder to write a page, a picture and a CSV file to; made if it does not exist. Its agents.jsonl keeps the runs that have
    finished: the same command goes on from there after Ctrl-C, and other cells and seeds are added to them. Remove it after a
    change of the code"""

    def run(self) -> int:
        """Play the cells, and print tables and findings; returns 0, or 130 after Ctrl-C.

        Raises:
            ConfigError: the options make no sense, or a run failed.
        """
        check_least("--jobs", self.jobs, 1)
        contenders, cells = self._contenders(), self.cells()
        sessions = load_sessions(self.trace)
        files = (f"agents.{suffix}" for suffix in ("md", "png", "csv"))
        folder = None if self.out is None else output_folder(self.out, files)
        finished = None if folder is None else FinishedRuns(folder / "agents.jsonl")
        effort = StudyEffort(not self.full, self.jobs, self.seed, Console(stderr=True), finished=finished)
        num_seeds = self.seeds or (FULL_SEEDS if self.full else 1)
        duration_s = self.duration or (FULL_S if self.full else SHORT_S)
        try:
            agent_map = play(effort, sessions, cells, contenders, num_seeds, duration_s)
        except KeyboardInterrupt:
            return 130
        study = answer(agent_map)
        study.show()
        if folder is not None:
            print(f"\nwritten: {', '.join(map(str, study.write(folder, 'agents')))}")
        return 0

    def cells(self) -> list[AgentCell]:
        """The cells to play. Raises `ConfigError` for a pool that is no number above 0, or a model that there is not."""
        models = MODELS if self.full else MODELS[:1]
        if self.model:
            models = [model for model in MODELS if any(part in model.title for part in listed(self.model))]
        if not models:
            titles = "; ".join(model.title for model in MODELS)
            raise ConfigError("no such model", got=", ".join(self.model), fix=f"a part of one of {titles}")
        devices = numbers("--device", self.device, float) or (DEVICES if self.full else SHORT_DEVICES)
        hosts = numbers("--host", self.host, float) or (HOSTS if self.full else SHORT_HOSTS)
        check_least("--device", min(devices), 0.01)
        check_least("--host", min(hosts), 0.0)
        check_least("--disk", self.disk, 0.0)
        if self.disk and not min(hosts):
            raise ConfigError("a disk needs a host tier", got="--host 0", fix="leave one of them out")
        return [AgentCell(*cell) for cell in product(models, devices, hosts, (self.disk,))]

    def _contenders(self) -> list[Contender]:
        by_title = {contender.title: contender for contender in CONTENDERS}
        for title in listed(self.contender):
            if title not in by_title:
                got, fix = title + nearest(title, tuple(by_title)), f"one of {', '.join(by_title)}"
                raise ConfigError("no such contender", got=got, fix=fix)
        check_policies(listed(self.policy))
        own = [Contender(place.rpartition(":")[2], place, "history") for place in listed(self.policy)]
        return [*(by_title[title] for title in listed(self.contender) or by_title), *own]
