"""The numbers that a prediction assumes, from `assumptions.toml`, each with its source."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "assumptions.toml"
MIB = 1 << 20
NO_BOUND = 1_000_000
"""Stands in the file for any size and any number of rows."""


class Assumption(NamedTuple):
    """A number with its unit and its source; `name` has the GPU before it if it is one GPU's."""

    name: str
    value: float
    unit: str
    source: str


class ProductReach(NamedTuple):
    """The rate of products with at most so many rows and MiB of weight, as a part of `copy_rate`."""

    most_mib: float
    most_rows: float
    reach: float


@dataclass(frozen=True)
class Assumptions:
    """All numbers by name, for one GPU; `assumptions.toml` says what each means."""

    product_reaches: tuple[ProductReach, ...]
    copy_rate: float
    tensor_rate: float
    plain_rate: float
    others_reach: float
    tensor_reach: float
    attention_reach: float
    attention_without_wide_loads: float
    chunk_reach: float
    peer_rate: float
    collective_latency: float
    memory_latency: float
    cache_latency: float
    loads_in_flight: float
    asynchronous_share: float
    cas_rate: float
    cas_attempts: float
    shortest_kernel: float
    stream_launch: float
    graph_launch: float
    graph_update: float
    graph_update_share: float
    uploads: float
    upload_bubble: float
    empty_block: float
    executable_call: float
    host_step: float
    host_wait: float
    loop_turns: float

    def product_reach(self, weight_bytes: float, rows: int) -> float:
        """The rate of a product as a part of `copy_rate`: that of the first entry that is large enough."""
        mib, entries = weight_bytes / MIB, self.product_reaches
        return next(entry.reach for entry in entries if mib <= entry.most_mib and rows <= entry.most_rows)


def listed() -> list[Assumption]:
    """All assumptions, in the order of the file; those of products are named by their bounds."""
    return [
        Assumption(name, float(entry["value"]), unit, entry["source"])
        for name, entry in _entries()
        for unit in [entry.get("unit", "of copy_rate")]
    ]


def assumed(gpu: str) -> Assumptions:
    """The assumptions for one GPU."""
    values = {entry.name: entry.value for entry in listed()}
    names = [field.name for field in fields(Assumptions) if field.name != "product_reaches"]
    products = [
        ProductReach(entry["most_mib"], entry["most_rows"], values[name])
        for name, entry in _entries()
        if name.startswith("product ")
    ]
    numbers = {name: values.get(f"{gpu}.{name}", values.get(name, 0.0)) for name in names}
    return Assumptions(tuple(products), **numbers)


def _entries() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The file's entries by name."""
    for name, content in tomllib.loads(PATH.read_text(encoding="utf-8")).items():
        if isinstance(content, list):
            yield from ((_product_name(entry), entry) for entry in content)
        elif "value" in content:
            yield name, content
        else:
            yield from ((f"{name}.{key}", content[key]) for key in content)


def _product_name(entry: Mapping[str, Any]) -> str:
    bounds = [
        f"{most:g} {of}" if most < NO_BOUND else f"any {of}"
        for most, of in ((entry["most_mib"], "MiB"), (entry["most_rows"], "rows"))
    ]
    return f"product to {bounds[0]}, {bounds[1]}"
