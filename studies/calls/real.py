"""`python -m studies calls --real`: a few requests in real time, as a table."""

from contextlib import closing

from rich.console import Console
from rich.progress import Progress

from jinfercept.llm import LLM
from jinfercept.sim.tables import TextTable, show
from studies.calls.alone import Row
from studies.calls.in_real_time import MIXES, RealLatency, measure_calls, tiny_llm

REPEATS = 5


def run_real(model: str | None, seed: int, *, quick: bool) -> tuple[TextTable, list[Row]]:
    """Measure, and print a table.

    Args:
        model: as `LLM`; None: a tiny one with random weights.
        seed: of the requests.
        quick: two mixes, once each.

    Returns:
        The table, and its rows as JSON values.

    Raises:
        ModelError: the model cannot be loaded.
    """
    mixes, repeats = (list(MIXES)[:2], 1) if quick else (list(MIXES), REPEATS)
    with closing(_load(model)) as llm, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("in real time", total=len(mixes))
        latencies = measure_calls(llm, seed, mixes, repeats, lambda: progress.advance(task))
    table = real_table(latencies)
    show(table.shown())
    return table, [latency._asdict() for latency in latencies]


def _load(model: str | None) -> LLM:
    if model is None:
        return tiny_llm()
    return LLM(model, lazy=False, kv_tokens=4096, max_num_seqs=1, max_num_batched_tokens=64)


def real_table(latencies: list[RealLatency]) -> TextTable:
    """A row for each request and way to call."""
    sync_s = {latency.mix: latency.latency_s for latency in latencies if latency.calls == "sync"}
    rows = [
        [
            latency.mix,
            latency.calls,
            str(latency.tokens),
            f"{1e3 * latency.writing_s / latency.tokens:.1f}",
            f"{latency.formula_s:.3f}",
            f"{latency.latency_s:.3f}",
            f"{latency.ratio - 1:+.1%}",
            f"{latency.reading_s:.3f}",
            f"{sync_s[latency.mix] / latency.latency_s:.2f}",
        ]
        for latency in latencies
    ]
    columns = (
        "request",
        "calls",
        "tokens",
        "ms/token",
        "formula s",
        "measured s",
        "difference",
        "reading s",
        "sync over it",
    )
    return TextTable("One request alone in real time, with tools that sleep.", columns, rows)
