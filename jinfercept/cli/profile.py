"""`jinfercept profile`: measure a model on this machine; tables, a JSON file and a picture of what came out."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from jinfercept.cli.options import Maybe, ModelName, Switch, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.sched.profile import Profile
from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import check_writable
from jinfercept.start.progress import StartDisplay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAYS = {"out": 1, "in": 1, "both": 2}
"""The transfers that are timed, and how many times its pages each moves."""


@dataclass(frozen=True, kw_only=True)
class MeasureProfile:
    """The command."""

    model: ModelName
    out: Maybe[str] = None
    """write the profile to this JSON file; engines on this machine find it without"""
    plot: Maybe[str] = None
    """draw steps, fit, residuals and bandwidths into this file"""
    quick: Switch = False
    """only what an engine measures that starts without one"""
    engine: Annotated[EngineOptions, engine_flags("profile")]

    def run(self) -> int:
        """Measure, and print tables; returns 0."""
        from jinfercept.llm import LLM

        for path, flag in ((self.out, "--out"), (self.plot, "--plot")):
            if path:
                check_writable(path, flag)
        if self.plot:
            check_drawing(self.plot)
        options: EngineOptions = {**self.engine, "profile": "quick" if self.quick else "measure"}
        with StartDisplay(notes=True) as progress, LLM(self.model, progress=progress, **options) as llm:
            progress.close()
            measured, page_size = llm.profile, llm.config.cache.page_size
        console = Console()
        console.print(_step_table(measured), _link_table(measured, page_size), _summary(measured))
        if self.out:
            measured.save(self.out)
            flag = f"--profile {self.out}"
            console.print(f"written to {self.out}: jinfercept run {flag}, jinfercept simulate {flag}")
        if self.plot:
            draw(measured, page_size, self.plot)
            console.print(f"drawn in {self.plot}")
        return 0


def _step_table(profile: Profile) -> Table:
    table = Table(title=f"steps, {profile.name}", caption="a full bucket; profile and line: price over fastest, less 1")
    for column in ("bucket", "rows", "context tokens", "fastest, ms", "median", "slowest", "profile", "line"):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for step in profile.tables["steps"]:
        seconds = step["seconds"]
        table.add_row(
            str(step["bucket"]),
            rows_of(step),
            f"{step['context_tokens']:,}",
            f"{1e3 * seconds:.2f}",
            f"{1e3 * step['median_s']:.2f}",
            f"{1e3 * step['most_s']:.2f}",
            f"{step['profile_s'] / seconds - 1:+.0%}",
            f"{step['line_s'] / seconds - 1:+.0%}",
        )
    return table


def _link_table(profile: Profile, page_size: int) -> Table:
    table = Table(title="host link, KV tokens per second", caption=f"pages of {page_size} tokens, per transfer")
    for column in ("pages", "MiB", *WAYS):
        table.add_column(column, justify="right")
    for link in profile.tables["links"]:
        tokens = link["pages"] * page_size
        rates = [f"{ways * tokens / link[f'{way}_s']:,.0f}" for way, ways in WAYS.items()]
        table.add_row(str(link["pages"]), f"{tokens * profile.kv_bytes_per_token / 2**20:.1f}", *rates)
    return table


def _summary(profile: Profile) -> str:
    """The numbers of the profile, a line each."""
    decoding = [step for step in profile.tables["steps"] if step["depth"] is None]
    worst = {
        price: max(abs(step[price] / step["seconds"] - 1) for step in decoding) for price in ("profile_s", "line_s")
    }
    stairs = zip(profile.bucket_tokens, profile.bucket_s, strict=True)
    return "\n".join(
        (
            f"S: {profile.saturation} query tokens; the model's KV: {profile.kv_bytes_per_token:,} bytes per token",
            f"profile: {', '.join(f'{tokens}: {1e3 * seconds:.1f} ms' for tokens, seconds in stairs)}, and "
            f"{1e6 * profile.per_context_s:.2f} µs per context token, {1e9 * profile.per_pair_s:.0f} ns per query token of a "
            f"chunk and token before it; off by {worst['profile_s']:.0%} at most where rows decode",
            f"line: max({1e3 * profile.flat_s:.1f}, {1e3 * profile.fixed_s:.1f} + {1e3 * profile.per_query_s:.3f} · query "
            f"tokens) ms and the same for contexts; off by {worst['line_s']:.0%} at most",
            f"link: {profile.link_out_tokens_per_s:,.0f} tokens/s out, {profile.link_in_tokens_per_s:,.0f} in, "
            f"{profile.link_both_tokens_per_s:,.0f} both ways together, and {1e6 * profile.copy_s:.0f} µs a transfer",
            _overflow_line(profile),
            f"dispatch: {1e3 * profile.dispatch_s:.2f} ms a step; measured in {profile.tables['took_s']:.1f} s",
        )
    )


def _overflow_line(profile: Profile) -> str:
    """A line with the cost of a context that is lost and of one that is swapped out and back, by its tokens."""
    chunk = profile.bucket_tokens[-1] if profile.bucket_tokens else profile.saturation
    prices = (
        f"{tokens:,}: {1e3 * profile.recompute_s(tokens, chunk):.1f} and {2e3 * profile.swap_s(tokens):.1f} ms"
        for tokens in (256, 1024, 4096)
    )
    return f"recomputing a context in chunks of {chunk}, and swapping it out and back, by tokens: {', '.join(prices)}"


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
