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
        found = measure_calls(llm, seed, mixes, repeats, lambda: progress.advance(task))
    table = real_table(found)
    show(table.shown())
    return table, [one._asdict() for one in found]


def _load(model: str | None) -> LLM:
    if model is None:
        return tiny_llm()
    return LLM(model, lazy=False, kv_tokens=4096, max_num_seqs=1, max_num_batched_tokens=64)


def real_table(found: list[RealLatency]) -> TextTable:
    """A row for each request and way to call."""
    sync_s = {one.mix: one.latency_s for one in found if one.calls == "sync"}
    rows = [
        [
            one.mix,
            one.calls,
            str(one.tokens),
            f"{1e3 * one.writing_s / one.tokens:.1f}",
            f"{one.formula_s:.3f}",
            f"{one.latency_s:.3f}",
            f"{one.ratio - 1:+.1%}",
            f"{one.reading_s:.3f}",
            f"{sync_s[one.mix] / one.latency_s:.2f}",
        ]
        for one in found
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
