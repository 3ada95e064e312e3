"""`jinfercept profile`: measures a model on this machine. Prints tables and writes a JSON file that engines read."""

from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from jinfercept.cli.options import Maybe, ModelName, Switch, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.sched.profile import Profile
from jinfercept.sim.reports import check_writable
from jinfercept.start.progress import StartDisplay

WAYS = {"out": 1, "in": 1, "both": 2}
"""The transfers that are timed, and how many times its pages each moves."""


@dataclass(frozen=True, kw_only=True)
class MeasureProfile:
    model: ModelName
    out: Maybe[str] = None
    """write the profile to this JSON file; engines on this machine find it without"""
    quick: Switch = False
    """only what an engine measures that starts without one"""
    engine: Annotated[EngineOptions, engine_flags("profile")]

    def run(self) -> int:
        """Measure, and print tables; returns 0."""
        from jinfercept.llm import LLM

        if self.out:
            check_writable(self.out, "--out")
        options: EngineOptions = {**self.engine, "profile": "quick" if self.quick else "measure"}
        with StartDisplay(notes=True) as progress, LLM(self.model, progress=progress, **options) as llm:
            progress.close()
            measured, page_size = llm.profile, llm.config.cache.page_size
        console = Console()
        console.print(_step_table(measured), _link_table(measured, page_size), _summary(measured))
        if self.out:
            measured.save(self.out)
            flag = f"--profile {self.out}"
            console.print(f"written to {self.out}: jinfercept serve MODEL {flag}, jinfercept simulate {flag}")
        return 0


def _step_table(profile: Profile) -> Table:
    table = Table(title=f"steps, {profile.name}", caption="a full bucket; profile and line: price over fastest, less 1")
    for column in ("bucket", "rows", "context tokens", "fastest, ms", "median", "slowest", "profile", "line"):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for step in profile.tables["steps"]:
        seconds = step["seconds"]
        table.add_row(
            str(step["bucket"]),
            _rows_of(step),
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
            f"dispatch: {1e3 * profile.dispatch_s:.2f} ms a step; measured in {profile.tables['took_s']:.1f} s",
        )
    )


def _rows_of(step: dict[str, Any]) -> str:
    if step["depth"] is None:
        return "decode"
    return f"a chunk behind {step['depth']:,}" if step["depth"] else "a chunk"
