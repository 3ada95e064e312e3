"""What a table of a study shows of a run's latencies: mean, percentiles and goodput, always together."""

from collections.abc import Sequence

from jinfercept.sim.reports import Range, latency_ms
from jinfercept.sim.run_stats import Report
from jinfercept.sim.tables import number_text

LATENCY_COLUMNS: Sequence[str] = ("mean", "p50", "p99", "goodput/s", "left")
"""Normalized latency as InferCept defines it, ms per token; requests within limits per second of arrivals; unfinished ones."""


def latency_cells(report: Report) -> list[str]:
    """The texts of `LATENCY_COLUMNS`."""
    latency = report["normalized_latency_paper_ms_per_token"]
    times = [number_or_dash(latency[part]) for part in ("mean", "p50", "p99")]
    return [*times, f"{goodput(report):.2f}", str(report["unfinished"])]


def num_good(report: Report) -> float:
    """Requests that finished within the report's limits."""
    return report["goodput_per_s"] * report["simulated_s"]


def goodput(report: Report) -> float:
    """Requests that finished within the report's limits, per second of arrivals: a long last call does not lessen it."""
    return num_good(report) / report["duration_s"]


def useful_tokens_per_s(report: Report) -> float:
    """Tokens generated for requests that finished, per second in which the device worked: what is generated for clients that
    never come back, recomputed or waited for lessens it."""
    return report["useful_tokens"] / (report["step_s"]["measured"] or 1.0)


def mean_ms(report: Report) -> float:
    """Mean normalized latency, ms per token; infinite for a run without requests that come back."""
    latency = latency_ms(report)
    return float("inf") if latency is None else latency


def limits_text(report: Report) -> str:
    """The limits of goodput, for a title."""
    limits = report["limits"]
    return f"goodput: first token within {limits['first_token_s']:g} s and {1e3 * limits['per_token_s']:g} ms per token"


def point(value: float) -> Range:
    """A value of one seed, to be drawn."""
    return Range(value, value, value)


def number_or_dash(value: float | None) -> str:
    """A number as in tables."""
    return "-" if value is None else number_text(value)
