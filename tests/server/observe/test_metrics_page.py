"""The documentation of metrics lists exactly the metrics of the server, with their kinds and labels."""

import re
from collections import Counter
from dataclasses import replace

from prometheus_client.metrics_core import Metric

from jinfercept.disk.store import DiskCounters, DiskOccupancy, DiskState
from jinfercept.engine.state import EngineState
from jinfercept.fleet.fan_out import front_metrics
from jinfercept.fleet.routes import Totals
from jinfercept.kv.page import SlotOccupancy
from jinfercept.meter.counts import EngineCounts, ToolCounts
from jinfercept.meter.engine_stats import Pages
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.server.observe.engine_snapshot import SnapshotValue
from jinfercept.server.observe.metric_families import MetricFamilies
from jinfercept.server.observe.metrics import Reading, families
from tests.support.docs_blocks import DOCS
from tests.support.live_server import Running

PAGE = (DOCS / "metrics.md").read_text()
ROW = re.compile(r"^\| `((?:vllm|jinfercept):\w+)` \| (\w+) \| (.*) \|$", re.MULTILINE)
IMAGES = {"jinfercept:cuda12"}
"""Tags of container images."""
ELSEWHERE = ("jinfercept:disk", "jinfercept:window", "jinfercept:state_slots")
"""Beginnings of the names of metrics that the server of these tests does not have."""
ENDS = {"counter": "_total", "info": "_info"}


def all_metrics() -> list[Metric]:
    """The metrics of an engine in which every label has a value."""
    counts = EngineCounts(
        steps=Counter({64: 1}),
        step_s={64: 1.0},
        moved_pages=Counter({("copy", "why"): 1}),
        tools={"price": ToolCounts(results=Counter(ok=1))},
    )
    pages = Pages(*[1] * len(Pages._fields))
    state = EngineState(counts, SchedulerCounters(), pages, 1, 1, 0, 0, 0, 0, has_work=False, quiescent=True)
    state = replace(state, window_pages=SlotOccupancy(1, 1, 1, 1), state_slots=SlotOccupancy(1, 1, 1, 1))
    disk = DiskState(DiskCounters(), DiskOccupancy(1, 2, 1), 1.0, works=True)
    reading = Reading(state, 16, 1, 1, 1, 1, True, 0, {}, disk)
    return list(families(SnapshotValue(reading, 0.0), "model"))


def published(served: Running) -> dict[str, str]:
    """Kinds of the metrics by their names in the text format, and those of a server with a disk, windows and states."""
    lines = served.http.get("/metrics").text.splitlines()
    elsewhere = [metric for metric in all_metrics() if metric.name.startswith(ELSEWHERE)]
    return dict(line.split()[2:4] for line in lines if line.startswith("# TYPE")) | {
        metric.name + ENDS.get(metric.type, ""): metric.type for metric in elsewhere
    }


def test_every_metric_is_on_the_page_with_its_kind(served: Running) -> None:
    kinds = {name: "gauge" if kind == "info" else kind for name, kind, _ in ROW.findall(PAGE)}
    assert kinds == published(served)


def test_every_label_is_told_of_and_so_are_its_values_where_there_are_few() -> None:
    meanings = {name: meaning for name, _, meaning in ROW.findall(PAGE)}
    for metric in all_metrics():
        meaning = meanings[metric.name + ENDS.get(metric.type, "")]
        for labels in (sample.labels for sample in metric.samples if metric.type != "info"):
            for label, value in labels.items():
                if label not in ("model_name", "le"):
                    assert label in meaning, f"{metric.name} does not tell of {label}"
                if label in ("state", "residency", "kind", "direction", "context"):
                    assert value in meaning, f"{metric.name} does not tell of {label}={value}"


def test_names_that_are_used_anywhere_are_shown(served: Running) -> None:
    front = front_metrics(Totals(Counter(), Counter(), Counter()), 1, MetricFamilies("model"))
    shown = {*published(served), *(metric.name + ENDS.get(metric.type, "") for metric in front)}
    names = {name + end for name in shown for end in ("", "_count", "_sum", "_bucket")}
    for page in DOCS.glob("*.md"):
        used = set(re.findall(r"\b(?:vllm|jinfercept):[a-z]\w+", page.read_text())) - IMAGES
        assert used <= names, page.name
