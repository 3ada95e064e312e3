"""The numbers that a prediction assumes, from `assumptions.toml`, each with its source."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "assumptions.toml"


class Assumption(NamedTuple):
    """A number with its unit and its source; `name` has the GPU before it if it is one GPU's."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Assumptions:
    """All numbers by name, for one GPU; `assumptions.toml` says what each means."""

    copy_rate: float
    tensor_rate: float
    plain_rate: float
    products_reach: float
    tensor_reach: float
    attention_reach: float
    attention_without_wide_loads: float
    peer_rate: float
    collective_latency: float
    memory_latency: float
    cache_latency: float
    loads_in_flight: float
    asynchronous_share: float
    cas_rate: float
    cas_attempts: float
    shortest_kernel: float
    launch_gap: float
    stream_launch: float
    graph_launch: float
    graph_update: float
    executable_call: float
    host_step: float
    host_wait: float
    loop_turns: float


def listed() -> list[Assumption]:
    """All assumptions, in the order of the file."""
    found = list[Assumption]()
    for name, entry in tomllib.loads(PATH.read_text(encoding="utf-8")).items():
        named: dict[str, dict[str, Any]] = (
            {name: entry} if "value" in entry else {f"{name}.{k}": entry[k] for k in entry}
        )
        found += [Assumption(name, float(one["value"]), one["unit"], one["source"]) for name, one in named.items()]
    return found


def assumed(gpu: str) -> Assumptions:
    """The assumptions for one GPU."""
    values = {found.name: found.value for found in listed()}
    names = [field.name for field in fields(Assumptions)]
    return Assumptions(**{name: values.get(f"{gpu}.{name}", values.get(name, 0.0)) for name in names})
