"""Cells and contenders of the study of agents, and their simulations."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from jinfercept.cli.simulate import check_policies
from jinfercept.errors import ConfigError, nearest
from jinfercept.sched.door import Overload
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.orders import check_order_choice
from jinfercept.sched.plugins import is_place
from jinfercept.sim.agent_sessions import ScriptedSession, fitting
from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from studies.agents.within_limits import AGENT_LIMITS, Shares, most_within_limits
from studies.answer import StudyEffort

PAGE_SIZE = 64
MEAN_CONTEXT = 105_000
"""Tokens of a session's context, the median of the traces."""


class AgentModel(NamedTuple):
    """A model on its machine.

    Attributes:
        title: for tables.
        profile: its prices, a name of `PROFILES`.
        kv_tokens: of its device pool.
    """

    title: str
    profile: str
    kv_tokens: int


MODELS = (
    AgentModel("8B, H100", "roofline-llama-3-8b-h100-attention", 400_000),
    AgentModel("70B, 8 × A100", "roofline-llama-3-70b-8xa100-attention", 400_000),
    AgentModel("32B, H100", "roofline-qwen2.5-32b-fp8-h100-attention", 400_000),
    AgentModel("8B, H200", "roofline-llama-3-8b-h200-attention", 850_000),
)
"""By data sheets. The pools are as large for all but the H200, so that a cell's sessions are the same."""


class AgentCell(NamedTuple):
    """A model and its pools.

    Attributes:
        model: of `MODELS`.
        device: device pool over the contexts of the live sessions; None: the number of live sessions is searched.
        host: host pool over the device pool.
        overload: what becomes of new sessions for which there is no room.
    """

    model: AgentModel
    device: float | None
    host: float
    overload: Overload = "serve"

    @property
    def live(self) -> int:
        """Sessions at a time, where they are given."""
        return max(1, round(self.model.kv_tokens / ((self.device or 1.0) * MEAN_CONTEXT)))

    def __str__(self) -> str:
        device = "" if self.device is None else f", device {self.device:g} ×"
        door = "" if self.overload == "serve" else f", {self.overload}"
        return f"{self.model.title}{device}, host {self.host:g} ×{door}"


class Contender(NamedTuple):
    """A policy under an order of waiting requests: the titles of both, and what `Simulation` takes.

    Attributes:
        policy, order: titles.
        place, order_place: names or places.
        estimator: of durations.
    """

    policy: str
    order: str
    place: str
    order_place: str
    estimator: str = "history"

    @property
    def title(self) -> str:
        return f"{self.policy}, {self.order}"


_RIVALS = "examples.rivals"
POLICIES: Mapping[str, str] = {
    "copy_ahead": "copy_ahead",
    "lru_host": "lru_host",
    "lru": "lru",
    "continuum": f"{_RIVALS}.continuum:TimeToLive",
    "mori": f"{_RIVALS}.mori:IdlenessTiers",
    "mars": f"{_RIVALS}.mars:WarmReturns",
    "cachewise": f"{_RIVALS}.cachewise:PredictedReuse",
    "belady": f"{_RIVALS}.belady:Belady",
    "infinite": "bound",
}
"""Places of policies by title. `belady` knows every return, and `infinite` has endless memory: bounds, not products."""
ORDERS: Mapping[str, str] = {
    "fcfs": "fcfs",
    "missing_work": "missing_work",
    "programs": f"{_RIVALS}.continuum:ProgramOrder",
    "feedback": f"{_RIVALS}.mars:FeedbackLevels",
    "longest_prefix": f"{_RIVALS}.cachewise:LongestPrefix",
}
"""Places of orders by title: the last three are Continuum's, MARS' and CacheWise's."""
OWN_ORDERS: Mapping[str, str] = {"continuum": "programs", "mars": "feedback", "cachewise": "longest_prefix"}
"""The order with which a policy was published, beside the two that all admit."""
BASELINE, SERVED = ("lru_host", "fcfs"), ("copy_ahead", "missing_work")
"""Titles of what engines with a host tier do, and of what `jinfercept serve` does."""


def contenders(names: Sequence[str] = ()) -> list[Contender]:
    """The contenders of these names: a policy under an order as `policy+order`, or a policy alone, under every order that it
    admits: the two common ones and its own.

    Args:
        names: with titles of `POLICIES` and `ORDERS`, or places; empty: all policies.

    Raises:
        ConfigError: there is no such policy or order.
    """
    compared = list[Contender]()
    for name in names or POLICIES:
        policy, _, named = name.partition("+")
        place = _place("policy", policy, POLICIES)
        for order in (named,) if named else dict.fromkeys(("fcfs", "missing_work", OWN_ORDERS.get(policy, "fcfs"))):
            order_place = _place("order", order, ORDERS)
            estimator = "oracle" if policy == "belady" else "history"
            titles = policy.rpartition(":")[2], order.rpartition(":")[2]
            compared.append(Contender(titles[0], titles[1], place, order_place, estimator))
    for contender in compared:
        check_policies([contender.place])
        check_order_choice(contender.order_place)
    return compared


def _place(kind: str, title: str, titles: Mapping[str, str]) -> str:
    if title not in titles and not is_place(title):
        got, fix = title + nearest(title, tuple(titles)), f"one of {', '.join(titles)}, or your own as path.py:Class"
        raise ConfigError(f"no such {kind}", got=got, fix=fix)
    return titles.get(title, title)


type Trial = tuple[AgentCell, Contender, int]
"""A cell, a contender, and a seed."""


class Matrix(NamedTuple):
    """The reports of a study's runs at given numbers of live sessions."""

    cells: Sequence[AgentCell]
    contenders: Sequence[Contender]
    seeds: Sequence[int]
    reports: Mapping[Trial, Report]

    def values(self, cell: AgentCell, contender: Contender, name: str) -> list[float]:
        """A number of the reports of all seeds, by its name; with a point where it is in a group. 0: nothing was counted."""
        group, _, inner = name.partition(".")
        reports = [self.reports[cell, contender, seed] for seed in self.seeds]
        return [(report[group][inner] if inner else report[group]) or 0.0 for report in reports]


def play(
    effort: StudyEffort,
    sessions: Sequence[ScriptedSession],
    cells: Sequence[AgentCell],
    compared: Sequence[Contender],
    num_seeds: int,
    duration_s: float,
) -> Matrix:
    """Simulate all contenders in all cells under the same sessions.

    Raises:
        ConfigError: no session fits a pool, and as `StudyEffort.play`.
    """
    seeds = range(effort.seed, effort.seed + num_seeds)
    trials = list(product(cells, compared, seeds))
    reports = effort.play([_run(sessions, trial, trial[0].live, duration_s, midway=False) for trial in trials])
    return Matrix(cells, compared, seeds, dict(zip(trials, reports, strict=True)))


def search(
    effort: StudyEffort,
    sessions: Sequence[ScriptedSession],
    cells: Sequence[AgentCell],
    compared: Sequence[Contender],
    num_seeds: int,
    duration_s: float,
) -> dict[Trial, Shares]:
    """What was tried for the most live sessions within the limits, by cell, contender and seed. Raises as `play`."""
    trials = list(product(cells, compared, range(effort.seed, effort.seed + num_seeds)))
    return most_within_limits(
        trials, lambda trial, live: _run(sessions, trial, live, duration_s, midway=True), effort.play
    )


def _run(sessions: Sequence[ScriptedSession], trial: Trial, live: int, duration_s: float, *, midway: bool) -> SweepRun:
    cell, contender, seed = trial
    fit = fitting(sessions, cell.model.kv_tokens)
    load = SessionLoad(fit, seed, live, duration_s=duration_s, named=True, midway=midway)
    simulation = _simulation(cell, contender, duration_s, warm_up_s=duration_s / (3 if midway else 10))
    return SweepRun(simulation, SimulatedLoad("agents", 0.0, seed, load))


def _simulation(cell: AgentCell, contender: Contender, duration_s: float, warm_up_s: float) -> Simulation:
    kv_tokens = cell.model.kv_tokens // PAGE_SIZE * PAGE_SIZE
    return Simulation(
        PROFILES[cell.model.profile],
        contender.place,
        contender.estimator,
        duration_s,
        drain_s=0.0,
        kv_tokens=kv_tokens,
        host_tokens=round(cell.host * kv_tokens),
        page_size=PAGE_SIZE,
        max_model_len=kv_tokens,
        prefix_caching=True,
        order=contender.order_place,
        overload=cell.overload,
        limits=AGENT_LIMITS,
        warm_up_s=warm_up_s,
    )
