"""What adapters cost a decode step: the same step of one model without them, with them unused, and with them, in turns."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jinfercept.errors import ConfigError
from jinfercept.models.adapters import (
    WEIGHTS,
    AdapterRoom,
    AdapterWeights,
    Factors,
    with_adapter,
    with_room,
)
from jinfercept.models.model import Model, abstract_params
from jinfercept.models.weight_axes import NUM_INPUTS
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import StepPlan
from jinfercept.start.profiler import full_rows, probe, settled
from jinfercept.start.start import EngineSetup, set_up

MODULES: Mapping[str, frozenset[str]] = {
    "q, v": frozenset({"q", "v"}),
    "attention": frozenset({"q", "k", "v", "o"}),
    "all": frozenset(WEIGHTS),
}
"""Modules that adapters change: the default of PEFT for Llama, those of attention, and all."""
CONTEXT = 256
"""Tokens of every row's context."""
STEPS, ROUNDS = 4, 12


@dataclass(frozen=True)
class Sizes:
    """What is measured: adapters, their rank, and rows of a step, which have the adapters in turn."""

    adapters: int
    rank: int
    rows: tuple[int, ...]


class Cost(NamedTuple):
    """Seconds of a step of a model without adapters, of one with some that no row has, and of one whose rows have them; each
    in the fastest of all turns: what disturbs only adds."""

    modules: str
    rows: int
    base_s: float
    unused_s: float
    adapted_s: float

    @property
    def unused(self) -> float:
        """With adapters that no row has, over without."""
        return self.unused_s / self.base_s

    @property
    def ratio(self) -> float:
        """With adapters over without."""
        return self.adapted_s / self.base_s


def measure(model: str, sizes: Sizes, flags: Mapping[str, Any]) -> list[Cost]:
    """The costs, printed as a table too. Raises `ConfigError` for a model of one's own."""
    setup = set_up(model, **{"max_num_seqs": max(sizes.rows), "lazy": True, **flags, "tool_lora": ""})
    try:
        costs = [cost for name in MODULES for cost in _costs(setup, name, sizes)]
    finally:
        setup.close()
    table = Table(title=f"a decode step with {sizes.adapters} adapters of rank {sizes.rank}, {CONTEXT} tokens a row")
    for column in ("modules", "rows", "without, ms", "unused, ms", "with, ms", "unused", "ratio"):
        table.add_column(column, justify="left" if column == "modules" else "right")
    for cost in costs:
        times = (f"{1e3 * seconds:.1f}" for seconds in (cost.base_s, cost.unused_s, cost.adapted_s))
        table.add_row(cost.modules, str(cost.rows), *times, f"{cost.unused:.2f}", f"{cost.ratio:.2f}")
    Console().print(table)
    return costs


def _costs(setup: EngineSetup, name: str, sizes: Sizes) -> list[Cost]:
    if not isinstance(model := setup.model, Model):
        raise ConfigError("a model of one's own has no adapters", got=setup.name, fix="name a checkpoint")
    room = AdapterRoom(sizes.adapters, sizes.rank, MODULES[name])
    params = with_room(model, setup.runner.params, room)
    for slot in range(1, sizes.adapters + 1):
        params = with_adapter(model, params, slot, sizes.rank, _random_adapter(model, room, slot))
    shape = replace(setup.shape, num_adapters=sizes.adapters)
    adapted = ModelRunner(model, params, shape, attention=setup.config.advanced.attention)
    adapted.reset()
    try:
        return [_compare(name, setup.runner, adapted, shape, rows) for rows in sizes.rows]
    finally:
        adapted.close()


def _random_adapter(model: Model, room: AdapterRoom, seed: int) -> AdapterWeights:
    rng = np.random.default_rng(seed)

    def normal(shape: Sequence[int]) -> np.ndarray:
        return 0.02 * rng.standard_normal(shape, np.float32)

    def layer(shapes: Mapping[str, Any]) -> dict[str, Factors]:
        return {
            name: Factors(
                normal((*shape[: NUM_INPUTS[name]], room.rank)), normal((room.rank, *shape[NUM_INPUTS[name] :]))
            )
            for name in room.weights & shapes.keys()
            if (shape := shapes[name].shape)
        }

    layers = abstract_params(model.checkpoint_config, jnp.float32, joined=False).layers
    return AdapterWeights(tuple(map(layer, layers)), room.rank, "")


def _compare(name: str, base: ModelRunner, adapted: ModelRunner, shape: RunnerShape, num_rows: int) -> Cost:
    """All in turns, each of a few steps."""
    bucket = next(size for size in shape.buckets if size >= num_rows)
    rows = full_rows(replace(shape, max_num_seqs=num_rows), num_rows, CONTEXT * num_rows)
    plan = replace(probe(shape, num_rows, rows), bucket=bucket)
    chunks = [chunk._replace(adapter=1 + chunk.slot % shape.num_adapters) for chunk in plan.chunks]
    cases = (base, plan), (adapted, plan), (adapted, replace(plan, chunks=tuple(chunks)))
    for runner, first in cases:
        runner.collect(runner.submit(first))
    turns = [[_seconds(runner, settled(first)) for runner, first in cases] for _ in range(ROUNDS)]
    return Cost(name, num_rows, *map(min, zip(*turns, strict=True)))


def _seconds(runner: ModelRunner, plan: StepPlan) -> float:
    began_s = time.perf_counter()
    for _ in range(STEPS):
        runner.collect(runner.submit(plan))
    return (time.perf_counter() - began_s) / STEPS
