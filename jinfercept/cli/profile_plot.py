"""A picture of a measured profile: steps, residuals, bandwidths. Measures nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinfercept.sched.profile import Profile
from jinfercept.sim.plots import check_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAYS = {"out": 1, "in": 1, "both": 2}
"""The transfers that are timed, and how many times its pages each moves."""


def rows_of(step: dict[str, Any]) -> str:
    """Describes the rows of a measured step."""
    if step["depth"] is None:
        return "decode"
    return f"a chunk behind {step['depth']:,}" if step["depth"] else "a chunk"


def draw(profile: Profile, page_size: int, path: str | Path) -> None:
    """Step times with the fit and S, residuals, and bandwidths. Raises `ConfigError` as `check_drawing` does."""
    check_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), layout="constrained")
    figure.suptitle(profile.name)
    (over_queries, over_context), (residuals, link) = figure.subplots(2, 2)
    _draw_queries(over_queries, profile)
    _draw_contexts(over_context, profile)
    _draw_residuals(residuals, profile)
    for way, ways in WAYS.items():
        points = [(row["pages"], ways * row["pages"] * page_size / row[f"{way}_s"]) for row in profile.tables["links"]]
        link.plot(*zip(*points, strict=True), marker=".", label=way)
    link.set(title="host link", xlabel=f"pages of {page_size} tokens per transfer", ylabel="KV tokens per second")
    link.set_xscale("log", base=2)
    for axes in (over_queries, over_context, residuals, link):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_queries(axes: "Axes", profile: Profile) -> None:
    for label, steps in _kinds(profile).items():
        spread = [[0.0] * len(steps), [1e3 * (step["median_s"] - step["seconds"]) for step in steps]]
        times = [1e3 * step["seconds"] for step in steps]
        axes.errorbar([step["bucket"] for step in steps], times, spread, fmt=".", capsize=2, label=label)
    largest = max(profile.bucket_tokens)
    queries = [largest ** (index / 100) for index in range(101)]
    line = [1e3 * max(profile.flat_s, profile.fixed_s + profile.per_query_s * tokens) for tokens in queries]
    stairs = [1e3 * seconds for seconds in profile.bucket_s]
    axes.step(profile.bucket_tokens, stairs, where="pre", linewidth=0.9, label="profile, no context")
    axes.plot(queries, line, linewidth=0.9, linestyle="--", label="line, no context")
    axes.axvline(profile.saturation, color="black", linewidth=0.8, linestyle=":", label=f"S = {profile.saturation}")
    axes.set(title="steps over query tokens", xlabel="query tokens of the bucket", ylabel="ms")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _draw_contexts(axes: "Axes", profile: Profile) -> None:
    for bucket in profile.bucket_tokens:
        steps = [step for step in profile.tables["steps"] if step["bucket"] == bucket and step["depth"] is None]
        contexts = [step["context_tokens"] for step in steps]
        [drawn] = axes.plot(contexts, [1e3 * step["seconds"] for step in steps], "o", label=f"bucket {bucket}")
        axes.plot(contexts, [1e3 * step["profile_s"] for step in steps], color=drawn.get_color(), linewidth=0.9)
    axes.set(title="steps over context tokens", xlabel="context tokens that decode rows read", ylabel="ms")
    axes.set_yscale("log")


def _draw_residuals(axes: "Axes", profile: Profile) -> None:
    steps = profile.tables["steps"]
    for price, marker in (("profile_s", "o"), ("line_s", "x")):
        off = [100 * (step[price] / step["seconds"] - 1) for step in steps]
        axes.plot(range(len(steps)), off, marker, label=price.removesuffix("_s"))
    axes.axhspan(-15, 15, alpha=0.08)
    names = [f"{step['bucket']}, {rows_of(step)}, {step['context_tokens']}" for step in steps]
    axes.set_xticks(range(len(steps)), names, rotation=90, fontsize="xx-small")
    axes.set(title="residuals", xlabel="bucket, rows, context tokens", ylabel="price over measurement, less 1, in %")


def _kinds(profile: Profile) -> dict[str, list[dict[str, Any]]]:
    """The measured steps by what their rows do."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for step in profile.tables["steps"]:
        label = "decode" if step["depth"] is None else "a chunk" if step["depth"] == 0 else "a chunk behind others"
        kinds.setdefault(label, []).append(step)
    return kinds
