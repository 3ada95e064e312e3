"""Tables, findings and pictures of the study of agents. Order and policy are reported apart."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from jinfercept.sim.reports import TextTable, paired_ratio, ranking
from studies.agents.cells import BASELINE, SERVED, AgentCell, Contender, Matrix, Trial
from studies.agents.within_limits import Shares, most_kept
from studies.answer import StudyAnswer
from studies.plots import Bars


def ratio_text(pairs: Sequence[tuple[float, float]]) -> str:
    """The ratio of the sums of pairs, with the interval of `paired_ratio` if there is one; `-` if it would divide by 0."""
    ratio, total = paired_ratio(pairs), sum(baseline for _, baseline in pairs)
    if ratio is not None:
        return f"{ratio.mean:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
    return f"{sum(own for own, _ in pairs) / total:.2f}" if total else "-"


class _Column(NamedTuple):
    """A column of the matrix: its title, its name in a report, and the format of its numbers."""

    title: str
    name: str
    form: str


_COLUMNS = (
    _Column("mean over turns, s", "turn_delay_s.mean", ".1f"),
    _Column("over sessions, s", "turn_delay_of_sessions_s", ".1f"),
    _Column("p99, s", "turn_delay_s.p99", ".0f"),
    _Column("longest wait, s", "longest_wait_s", ".0f"),
    _Column("at the door, s", "door_s.mean", ".0f"),
    _Column("not served", "unserved_share", ".1%"),
    _Column("within limits", "within_limits_share", ".0%"),
    _Column("turns within limits/s", "goodput_per_s", ".3f"),
    _Column("recomputed", "recomputed_tokens", ",.0f"),
)
"""Seconds at the door count in the column of their own and in the turns within limits per second."""


def matrix_answer(matrix: Matrix) -> StudyAnswer:
    """The answer from runs at given numbers of live sessions."""
    rows = [
        {"policy": contender.policy, "order": contender.order, "cell": str(cell), "live": cell.live, "seed": seed}
        | report
        for (cell, contender, seed), report in matrix.reports.items()
    ]
    tables = [_matrix_table(matrix, cell) for cell in matrix.cells]
    findings = [
        finding
        for cell in matrix.cells
        for finding in _comparisons(
            f"{cell}: mean turn delay",
            matrix.contenders,
            lambda it, cell=cell: matrix.values(cell, it, "turn_delay_s.mean"),
            larger=False,
        )
    ]
    return StudyAnswer("Coding agents: how long they wait, by policy and by order", tables, findings, rows=rows)


def _matrix_table(matrix: Matrix, cell: AgentCell) -> TextTable:
    rows = [
        [
            contender.policy,
            contender.order,
            *(_spread(matrix.values(cell, contender, column.name), column.form) for column in _COLUMNS),
        ]
        for contender in matrix.contenders
    ]
    title = f"{cell}: {cell.live} live sessions; mean of {len(matrix.seeds)} seeds, and the least and most of them."
    return TextTable(title, ["policy", "order", *(column.title for column in _COLUMNS)], rows)


def search_answer(tried: Mapping[Trial, Shares]) -> StudyAnswer:
    """The answer from searches: agents within limits, by cell, policy and order."""
    cells = list(dict.fromkeys(cell for cell, _, _ in tried))
    compared = list(dict.fromkeys(contender for _, contender, _ in tried))
    seeds = list(dict.fromkeys(seed for _, _, seed in tried))

    def agents(cell: AgentCell, contender: Contender) -> list[float]:
        return [float(most_kept(tried[cell, contender, seed])) for seed in seeds]

    rows = [
        [contender.policy, contender.order, *(_spread(agents(cell, contender)) for cell in cells)]
        for contender in compared
    ]
    title = f"Agents within limits: mean over {len(seeds)} seeds, and the least and most of them."
    table = TextTable(title, ["policy", "order", *map(str, cells)], rows)
    findings = [
        finding
        for cell in cells
        for finding in _comparisons(f"{cell}: agents", compared, lambda it, cell=cell: agents(cell, it), larger=True)
    ]
    bars = {str(cell): {it.title: fmean(agents(cell, it)) for it in compared} for cell in cells}
    reports = [
        {"cell": str(cell), "policy": it.policy, "order": it.order, "seed": seed, "agents": most_kept(shares)}
        | {f"{live} live": share for live, share in sorted(shares.items())}
        for (cell, it, seed), shares in tried.items()
    ]
    panels = [[Bars("agents within limits", "live sessions", bars, beside=True)]]
    return StudyAnswer("Coding agents: how many are served within the limits", [table], findings, panels, reports)


def _spread(values: Sequence[float], form: str = ".3g") -> str:
    mean, least, most = (f"{value:{form}}" for value in (fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least}–{most})"


def _comparisons(
    title: str, compared: Sequence[Contender], values: Callable[[Contender], Sequence[float]], *, larger: bool
) -> Iterator[str]:
    """What the order does under the baseline's policy, and the policy under the served order; then all from the best on."""
    by_title = {(contender.policy, contender.order): contender for contender in compared}
    same_policy, same_order = (BASELINE[0], SERVED[1]), (SERVED[0], BASELINE[1])
    for kind, own, other in (
        ("the order", same_policy, BASELINE),
        ("the policy", SERVED, same_policy),
        ("the policy, first come", same_order, BASELINE),
        ("both", SERVED, BASELINE),
    ):
        if own in by_title and other in by_title:
            ratio = ratio_text(list(zip(values(by_title[own]), values(by_title[other]), strict=True)))
            yield f"{title}, {kind}: {', '.join(own)} over {', '.join(other)}: {ratio}."
    ranked = ranking({it.title: dict(enumerate(values(it))) for it in compared}, larger=larger)
    yield f"{title}, the best first: {'; '.join(ranked)}."
