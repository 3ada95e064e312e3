"""What `jinfercept plan` prints and writes: a table of the kinds, a picture, JSON and the file of `jinfercept deploy`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinfercept.planner.sizing import FleetLoad, Sizing
from jinfercept.sim.plots import Bars
from jinfercept.sim.tables import TextTable

COLUMNS = (
    *("replicas", "kind", "accelerators", "cost/h", "within limits", "one fewer", "first token p99 s", "s/token"),
    *("steps run", "found"),
)
LEGEND = (
    "steps run: share of the time; found: share of the prompt tokens, not recomputed; cost: of all accelerators, by --price, "
    "or 1 each; -: no number of replicas meets the limits"
)


def write_yaml(path: str | Path, values: Any) -> None:
    """Write the file of `jinfercept deploy`."""
    import yaml

    Path(path).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def plan_table(sizings: Sequence[Sizing], load: FleetLoad) -> TextTable:
    """A row for each kind, the cheapest first."""
    title = f"{load.rate:.3g} sessions/s, {load.share:.0%} of the requests within {load.limits.first_token_s:g} s to the first "
    title += f"token and {load.limits.per_token_s:g} s per token after it"
    return TextTable(title, COLUMNS, [_row(sizing) for sizing in sizings])


def _row(sizing: Sizing) -> list[str]:
    report, kind = sizing.report, sizing.kind
    return [
        str(sizing.replicas or "-"),
        kind.label,
        str(sizing.replicas * kind.num_devices or "-"),
        f"{sizing.cost:.4g}" if sizing.replicas else "-",
        f"{report.good_share:.1%}",
        "-" if sizing.fewer is None else f"{sizing.fewer.good_share:.1%}",
        f"{report.first_token_s[2]:.3g}",
        f"{report.token_s:.3g}",
        f"{report.busy_share:.0%}",
        f"{report.found_share:.0%}",
    ]


def plan_panels(sizings: Sequence[Sizing], load: FleetLoad) -> list[list[Bars]]:
    """The cost of the fleets, and the share of requests within the limits."""
    shares = {sizing.kind.label: {"within limits": sizing.report.good_share} for sizing in sizings}
    for sizing in sizings:
        if sizing.fewer is not None:
            shares[sizing.kind.label]["one replica fewer"] = sizing.fewer.good_share
    possible = [sizing for sizing in sizings if sizing.replicas]
    cost = {f"{sizing.replicas} × {sizing.kind.label}": {"cost": sizing.cost} for sizing in possible}
    title = f"{load.rate:.3g} sessions/s"
    panels = [Bars(f"{title}: share of requests", "within the limits", shares, beside=True)]
    return [[Bars(f"{title}: cost of the fleet", "per hour", cost), *panels] if cost else panels]


def sizing_values(sizing: Sizing) -> dict[str, Any]:
    """A sizing as it is written to JSON."""
    return {
        "kind": sizing.kind.label,
        "profile": sizing.kind.simulation.profile.name,
        "policy": sizing.kind.simulation.policy_name,
        "replicas": sizing.replicas or None,
        "cost_per_h": sizing.cost,
        "tried": {str(count): share for count, share in sizing.tried.items()},
        "report": sizing.report._asdict(),
        "fewer": None if sizing.fewer is None else sizing.fewer._asdict(),
    }
