"""Results of the InferCept paper (arXiv 2402.01869), for comparison with simulated ones."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jinfercept.errors import ConfigError, shown

SYSTEMS: Mapping[str, str] = {
    "vLLM": "discard",
    "ImprovedDiscard": "improved_discard",
    "Preserve": "preserve",
    "Swap": "swap",
    "InferCept": "min_waste",
}
"""The policy that stands for each of the paper's systems."""

WASTE: Mapping[str, float] = {"discard": 0.27, "swap": 0.26, "min_waste": 0.0069}
"""Wasted share of GPU memory × time, by policy."""


class AblationStep(NamedTuple):
    """A step of the ablation: a policy, what it adds, and the change of normalized latency from the step before."""

    policy: str
    adds: str
    change: float | None


ABLATION = (
    AblationStep("discard", "vLLM of the time", None),
    AblationStep("improved_discard", "requeue by original arrival", -0.245),
    AblationStep("chunked_discard", "chunked recomputation", -0.078),
    AblationStep("budgeted_swap", "swap within the free link budget", -0.127),
    AblationStep("heuristic_preserve", "short automated calls keep their context", -0.461),
    AblationStep("min_waste", "the least waste decides", -0.464),
)

Figure = Mapping[str, Mapping[str, list[tuple[float, float]]]]
"""By panel and policy: (requests per second, ms per token), by ascending rate."""

_COLUMNS = ("panel", "system", "req_per_s", "normalized_latency_ms_per_token")


def load_figure(path: str | Path) -> Figure:
    """The paper's Figure 2 from a digitised table: a CSV file with the columns panel, system, req_per_s and
    normalized_latency_ms_per_token.

    Raises:
        ConfigError: no such file, other columns, an unknown system, or something that is no number.
    """
    curves_by_panel: dict[str, dict[str, list[tuple[float, float]]]] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if not set(_COLUMNS) <= set(rows.fieldnames or ()):
                got = ", ".join(rows.fieldnames or ()) or "nothing"
                raise ConfigError(f"{path} is no table of the figure", got=got, fix=f"columns {', '.join(_COLUMNS)}")
            for row in rows:
                panel, policy, point = _point(row, f"{path}, line {rows.line_num}")
                curves_by_panel.setdefault(panel, {}).setdefault(policy, []).append(point)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the reference cannot be read", got=f"{path} ({error})", fix="name a .csv file") from None
    return {
        panel: {policy: sorted(points) for policy, points in curves.items()}
        for panel, curves in curves_by_panel.items()
    }


def _point(row: Mapping[str, str], where: str) -> tuple[str, str, tuple[float, float]]:
    panel, system, *texts = (row[name] for name in _COLUMNS)
    if system not in SYSTEMS:
        raise ConfigError(f"{where}: no such system", got=shown(system), fix=f"one of {', '.join(SYSTEMS)}")
    try:
        rate, latency = (float(text) for text in texts)
    except (TypeError, ValueError):
        rate = latency = math.nan
    if not (0 < rate < math.inf and 0 < latency < math.inf):
        raise ConfigError(f"{where}: not a rate and a latency", got=texts, fix="two numbers above 0")
    return panel, SYSTEMS[system], (rate, latency)
