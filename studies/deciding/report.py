"""Where deciding matters: `copy_ahead` against the others over host memory, link, load, clients that return, and durations."""

from collections.abc import Iterator, Sequence

from jinfercept.sched.plugins import is_place
from jinfercept.sched.policies import check_choice
from jinfercept.sim.reports import Range, TextTable
from studies.answer import StudyAnswer, StudyEffort
from studies.deciding.cells import (
    BASELINE,
    CROWD_SEEDS,
    FACTORS,
    ORDERED,
    OURS,
    PLANES,
    RIVALS,
    Contender,
    DecidingCell,
    DecidingMap,
    axis,
    plane,
    play,
)
from studies.plots import COLOURS, CurvePanel, HeatMap, PlottedCurve

MEASURES = {"mean": "mean ms/token", "p99": "p99 ms/token", "good": "good requests/s"}
"""By the field of `CellResult`."""
_MORE_COLOURS = ("#e31a1c", "#6a3d9a", "#b15928", "#000000")
"""Of contenders that have none in `COLOURS`, so that they have the same one in every panel."""
TIE = 0.02
"""Share within which two numbers count as the same."""


def ask(effort: StudyEffort) -> StudyAnswer:
    """One factor at a time around a centre for all policies, and two planes for `copy_ahead` over `lru_host`.

    Policies of the user's own (`effort.policies`) are served beside the built-in ones.

    Raises:
        ConfigError: one of them cannot be made, and as `StudyEffort.play`.
    """
    contenders_by_one = contenders(effort)
    return answer(play(effort, contenders_by_one), [contender.name for contender in contenders_by_one], effort.quick)


def contenders(effort: StudyEffort) -> list[Contender]:
    """The policies that are compared. Raises `ConfigError` if one of the user's own cannot be made."""
    for place in effort.policies:
        check_choice(place)
    own = [Contender(place, "history" if is_place(place) else "elapsed") for place in effort.policies]
    return list(dict.fromkeys((OURS, BASELINE, *(RIVALS[-1:] if effort.quick else RIVALS), *own)))


def answer(deciding_map: DecidingMap, names: Sequence[str], quick: bool) -> StudyAnswer:
    """Tables, findings and panels of a map with contenders of these names."""
    tables = [_axis_table(deciding_map, factor, names, quick) for factor in FACTORS]
    return StudyAnswer(
        "Where does deciding matter?",
        [*tables, _order_table(deciding_map, quick), _crowd_table(deciding_map), *_planes(deciding_map, quick)],
        list(_findings(deciding_map, names, quick)),
        _panels(deciding_map, names, quick),
        deciding_map.rows,
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def _axis_table(deciding_map: DecidingMap, factor: str, names: Sequence[str], quick: bool) -> TextTable:
    rows = [
        [_value(cell, factor), *(_packed(deciding_map, cell, name) for name in names)] for cell in axis(factor, quick)
    ]
    title = f"By {FACTORS[factor].title}: mean, p50 and p99 ms/token; goodput in requests/s."
    return TextTable(title, [FACTORS[factor].title, *names], rows)


def _packed(deciding_map: DecidingMap, cell: DecidingCell, name: str) -> str:
    result = deciding_map.played[cell, name]
    return f"{result.mean:.1f}, {result.p50:.1f}, {result.p99:.0f}; {result.good:.2f}"


def _order_table(deciding_map: DecidingMap, quick: bool) -> TextTable:
    rows = []
    for cell in axis("load", quick):
        for contender in (OURS, ORDERED):
            did = deciding_map.played[cell, contender.name]
            numbers = (
                f"{did.mean:.2f}",
                f"{did.p50:.2f}",
                f"{did.p99:.1f}",
                f"{did.first_token_s:.2f}",
                f"{did.good:.2f}",
            )
            rows.append([_value(cell, "load"), contender.order_name, *numbers])
    columns = ["load", "order", "mean ms/token", "p50", "p99", "p99 of first token, s", "good/s"]
    return TextTable("Orders of waiting requests under copy_ahead, by load.", columns, rows)


def _crowd_table(deciding_map: DecidingMap) -> TextTable:
    rows = []
    for report in deciding_map.crowd:
        latency = report["normalized_latency_paper_ms_per_token"]
        kept = f"{report['kept_tokens']:,}", f"{report['kept_tokens'] / max(1, report['returned_tokens']):.1%}"
        numbers = (f"{latency[name]:.1f}" for name in ("mean", "p50", "p99"))
        rows.append([str(report["seed"]), report["policy"], *kept, *numbers, f"{report['goodput_per_s']:.2f}"])
    columns = ["seed", "policy", "kept tokens", "of those that return", "mean ms/token", "p50", "p99", "good/s"]
    return TextTable("A crowd in which 70 of 100 clients never return.", columns, rows)


def _planes(deciding_map: DecidingMap, quick: bool) -> Iterator[TextTable]:
    for rows, columns in PLANES:
        cells = plane(rows, columns, quick)
        yield TextTable(
            f"copy_ahead over lru_host: mean, p99 and goodput, by {FACTORS[rows].title} (down) and {FACTORS[columns].title}.",
            [rows, *(_value(cell, columns) for cell in cells[0])],
            [[_value(line[0], rows), *(_ratios(deciding_map, cell) for cell in line)] for line in cells],
        )


def _ratios(deciding_map: DecidingMap, cell: DecidingCell) -> str:
    return ", ".join(f"{deciding_map.ratio(cell, measure):.2f}" for measure in MEASURES)


def _value(cell: DecidingCell, factor: str) -> str:
    return FACTORS[factor].values[getattr(cell, factor)]


# -- findings ----------------------------------------------------------------------------------------------------------


def _findings(deciding_map: DecidingMap, names: Sequence[str], quick: bool) -> Iterator[str]:
    cells = list(dict.fromkeys(cell for factor in FACTORS for cell in axis(factor, quick)))
    yield from (_against(deciding_map, cells, name) for name in names if name != OURS.name)
    yield from _winners(deciding_map, cells, names)
    for rows, columns in PLANES:
        yield from _plane_findings(
            deciding_map, [cell for line in plane(rows, columns, quick) for cell in line], (rows, columns)
        )
    yield _crowd_finding(deciding_map)
    yield from _order_findings(deciding_map, axis("load", quick))


def _crowd_finding(deciding_map: DecidingMap) -> str:
    kept = {
        name: sum(report["kept_tokens"] for report in deciding_map.crowd if report["policy"] == name)
        for name in (OURS.policy, BASELINE.policy)
    }
    times = kept[OURS.policy] / max(1, kept[BASELINE.policy])
    return (
        f"In a crowd in which 70 of 100 clients never return, copy_ahead keeps {kept[OURS.policy]:,} tokens of the contexts "
        f"that return, {times:.2f} times as many as lru_host, over {CROWD_SEEDS} seeds."
    )


def _against(deciding_map: DecidingMap, cells: Sequence[DecidingCell], name: str) -> str:
    """How often ours is better and worse than another one in the mean, and where most."""
    ratios = {cell: deciding_map.ratio(cell, "mean", OURS.name, name) for cell in cells}
    better = sum(ratio < 1 - TIE for ratio in ratios.values())
    worse = sum(ratio > 1 + TIE for ratio in ratios.values())
    best, worst = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return (
        f"Against {name}, copy_ahead's mean is more than {TIE:.0%} lower in {better} and higher in {worse} of {len(cells)} "
        f"cells: {ratios[best]:.2f} times at {_where(best)}, {ratios[worst]:.2f} times at {_where(worst)}."
    )


def _winners(deciding_map: DecidingMap, cells: Sequence[DecidingCell], names: Sequence[str]) -> Iterator[str]:
    """How often each contender is the best, or as good, by each measure."""
    for measure, title in MEASURES.items():
        count = {name: sum(_is_best(deciding_map, cell, measure, name, names) for cell in cells) for name in names}
        told = ", ".join(f"{name} in {number}" for name, number in sorted(count.items(), key=lambda item: -item[1]))
        yield f"Best {title}, or within {TIE:.0%} of it, in {len(cells)} cells: {told}."


def _is_best(deciding_map: DecidingMap, cell: DecidingCell, measure: str, name: str, names: Sequence[str]) -> bool:
    own = getattr(deciding_map.played[cell, name], measure)
    all_of_them = [getattr(deciding_map.played[cell, other], measure) for other in names]
    return own >= max(all_of_them) * (1 - TIE) if measure == "good" else own <= min(all_of_them) * (1 + TIE)


def _plane_findings(
    deciding_map: DecidingMap, cells: Sequence[DecidingCell], factors: tuple[str, str]
) -> Iterator[str]:
    for measure, title in MEASURES.items():
        ratios = {cell: deciding_map.ratio(cell, measure) for cell in cells}
        low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        yield (
            f"Over {factors[0]} and {factors[1]}, copy_ahead's {title} is between {ratios[low]:.2f} ({_where(low)}) and "
            f"{ratios[high]:.2f} ({_where(high)}) times that of lru_host."
        )


def _order_findings(deciding_map: DecidingMap, cells: Sequence[DecidingCell]) -> Iterator[str]:
    for measure, title in MEASURES.items():
        ratios = [
            f"{deciding_map.ratio(cell, measure, ORDERED.name, OURS.name):.2f} at {cell.load:g}" for cell in cells
        ]
        yield f"Under copy_ahead, MemoryTime's {title} over that of first come first served, by load: {', '.join(ratios)}."


def _where(cell: DecidingCell) -> str:
    """The factors of a cell that are not the centre's."""
    varied = [name for name in FACTORS if getattr(cell, name) != getattr(DecidingCell(), name)]
    return ", ".join(f"{name} {_value(cell, name)}" for name in varied) or "the centre"


# -- picture -----------------------------------------------------------------------------------------------------------


def _panels(deciding_map: DecidingMap, names: Sequence[str], quick: bool) -> list[list[CurvePanel | HeatMap]]:
    """Curves of the mean by each factor and of goodput by load, with one legend; then a row of heat maps for each plane."""
    mean = [_curves(deciding_map, factor, "mean", names, quick) for factor in FACTORS]
    curves = [*mean, _curves(deciding_map, "load", "good", names, quick)]
    bare = [panel._replace(curves=[line._replace(name=None) for line in panel.curves]) for panel in curves]
    maps = [[_heat(deciding_map, pair, measure, quick) for measure in MEASURES] for pair in PLANES]
    return [[*bare[:2], curves[2]], [*bare[3:]], *([*row] for row in maps)]


def _curves(deciding_map: DecidingMap, factor: str, measure: str, names: Sequence[str], quick: bool) -> CurvePanel:
    """A number of every contender, the values of a factor at equal distances."""
    cells = axis(factor, quick)
    lines = []
    for number, name in enumerate(names):
        values = [getattr(deciding_map.played[cell, name], measure) for cell in cells]
        points = [(at, Range(value, value, value)) for at, value in enumerate(values) if value > 0]
        lines.append(PlottedCurve(name, points, COLOURS.get(name, _MORE_COLOURS[number % len(_MORE_COLOURS)])))
    ticks = [_value(cell, factor) for cell in cells]
    title = f"{MEASURES[measure]}, by {factor}"
    return CurvePanel(title, lines, unit=MEASURES[measure], axis=FACTORS[factor].title, ticks=ticks)


def _heat(deciding_map: DecidingMap, factors: tuple[str, str], measure: str, quick: bool) -> HeatMap:
    cells = plane(*factors, quick)
    values = [[deciding_map.ratio(cell, measure) for cell in line] for line in cells]
    most = max(max(value, 1 / max(value, 0.1)) for line in values for value in line)
    return HeatMap(
        f"copy_ahead / lru_host: {MEASURES[measure]}",
        (FACTORS[factors[0]].title, FACTORS[factors[1]].title),
        [_value(line[0], factors[0]) for line in cells],
        [_value(cell, factors[1]) for cell in cells[0]],
        values,
        min(max(most, 1.1), 3.0),
        framed=(1.0, 0.0),
        better="more" if measure == "good" else "less",
    )
