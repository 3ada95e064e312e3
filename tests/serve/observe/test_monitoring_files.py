"""The dashboard and the rules in `deploy/`: they can be parsed, and every metric and label in them is in `/metrics`."""

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from jinfercept.engine.meter.counts import EngineCounts, ToolCounts
from jinfercept.engine.meter.engine_stats import Pages
from jinfercept.engine.state import EngineState
from jinfercept.fleet.fan_out import front_metrics
from jinfercept.fleet.replicas import Totals
from jinfercept.kv.disk import DiskCounters, DiskOccupancy, DiskState
from jinfercept.kv.page import SlotOccupancy
from jinfercept.llm import LLM
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.serve.observe.metrics import MetricFamilies, SnapshotValue, collect
from tests.support.docs_blocks import DOCS
from tests.support.live_server import Running
from tests.support.scripted_model import Scripted
from tests.support.tool_server import QUESTION, ask, called, returned, says

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
    state = EngineState(counts, SchedulerCounters(), pages, 1, 1, 0, 0, 0, 0, 0, has_work=False, quiescent=True)
    state = replace(state, window_pages=SlotOccupancy(1, 1, 1, 1), state_slots=SlotOccupancy(1, 1, 1, 1))
    disk = DiskState(DiskCounters(), DiskOccupancy(1, 2, 1), works=True)
    plan = SimpleNamespace(token_bytes=lambda page_size: 1)
    cache = SimpleNamespace(enable_prefix_caching=True)
    llm = SimpleNamespace(memory_plan=plan, shape=SimpleNamespace(page_size=16), config=SimpleNamespace(cache=cache))
    llm.profile, llm.disk, llm.is_sleeping = SimpleNamespace(link_tokens=lambda seconds: 1), disk, False
    service: Any = SimpleNamespace(llm=llm, names=["model"], pending_calls={}, refused={})

    async def collected() -> list[Metric]:  # on a loop, whose tasks are counted
        return collect(service, SnapshotValue(state, 0.0))

    return asyncio.run(collected())


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


DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD: Any = json.loads((DEPLOY / "grafana" / "jinfercept.json").read_text(encoding="utf-8"))
RULES: Any = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))
OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds to every metric of a server."""
Labels = Mapping[str, set[str]]


@pytest.fixture
def exposed(server: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> Labels:
    """Labels of all metrics by name, after a request that calls a tool of the server and is followed up."""
    disk = DiskState(DiskCounters(), DiskOccupancy(1, 2, 1), works=True)
    monkeypatch.setattr(LLM, "disk", property(lambda llm: disk))  # the server of these tests has none
    says(scripted, server, "It costs 23.", [*QUESTION, called("", ("price", "lamp")), returned("23")])
    names: defaultdict[str, set[str]] = defaultdict(set)
    for _ in range(50):
        ask(server, QUESTION)
        for family in text_string_to_metric_families(server.http.get("/metrics").text):
            for sample in family.samples:
                names[sample.name] |= sample.labels.keys() | OF_TARGETS
        if "jinfercept:moved_pages_total" in names:  # by a tool that took longer than a step
            break
    return names | {"up": set(OF_TARGETS)}


def selectors(expression: Any) -> Iterator[Any]:
    """All selectors of a parsed expression."""
    match expression:
        case promql.VectorSelector():
            yield expression
        case promql.MatrixSelector():
            yield expression.vector_selector
        case promql.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from selectors(expression.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            pass
        case _:
            raise AssertionError(f"an expression of a kind that this test does not know: {expression!r}")


def check(text: str, exposed: Labels, shown: str = "") -> set[str]:
    """Assert that the metrics and the labels of a query exist; returns the names of the metrics.

    Args:
        shown: a text with the labels of the result.
    """
    parsed = promql.parse(text.replace("$__rate_interval", "5m"))
    names: set[str] = set()
    listed: set[str] = set()
    for selector in selectors(parsed):
        assert selector.name in exposed, f"{selector.name} is no metric: {text}"
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= exposed[selector.name], f"{matched - exposed[selector.name]} of {selector.name}"
        names.add(selector.name)
        listed |= exposed[selector.name]
    grouped = {
        label.strip()
        for labels in re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", text)
        for label in labels.split(",")
    }
    assert grouped <= listed, f"{grouped - listed} in {text}"
    used = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", shown))
    assert used <= (grouped or listed), f"{used - grouped} in the legend of {text}"
    return names


def test_rules_use_metrics_that_exist(exposed: Labels) -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    alerts = [rule for rule in rules if "alert" in rule]
    labels = {
        name: set(re.split(r",\s*", re.findall(r"\bby \(([^)]*)\)", text)[0])) - {"le"}
        for name, text in recorded.items()
    }
    for expression in recorded.values():
        check(expression, exposed)
    used = set[str]()
    for rule in alerts:
        annotations = "".join(rule["annotations"].values())
        used |= check(rule["expr"], {**exposed, **labels}, annotations.replace("{{ $value", ""))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 8
    assert {"up", "jinfercept:reading_age_seconds", "model:request_failures:ratio_rate5m"} <= used


def test_the_dashboard_shows_metrics_that_exist(exposed: Labels) -> None:
    shown = set[str]()
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            shown |= check(target["expr"], exposed, target["legendFormat"])
    for variable in DASHBOARD["templating"]["list"][1:]:
        [(metric, label)] = re.findall(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variable["definition"])
        assert label in exposed[metric]
    unused = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed} - {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in shown
    }
    assert unused <= {  # what a dashboard does not need
        "up",
        "vllm:cache_config_info",
        "vllm:kv_cache_usage_perc",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total",
        "jinfercept:link_budget_bytes_total",
        "jinfercept:tasks",
        "jinfercept:sleeping",
    }
