"""Tables, findings and pictures of the study of agents."""

from collections.abc import Iterator, Sequence

from jinfercept.sim.tables import TextTable, number_text
from studies.agents.cells import BASELINE, BOUNDS, INFINITE, OURS, AgentCell, AgentMap, AgentModel, Contender
from studies.answer import StudyAnswer
from studies.plots import HeatMap

TIE = 0.02
"""Share within which two numbers count as the same."""
MEASURES = {"mean": "mean turn delay, s", "p99": "p99 turn delay, s", "good": "turns/s within the limits"}
"""By the field of `CellResult`."""


def answer(agent_map: AgentMap) -> StudyAnswer:
    """The answer from a map."""
    return StudyAnswer(
        "Agents of 100,000 tokens: who wins where?",
        [*(_cell_table(agent_map, cell) for cell in agent_map.cells), *_win_tables(agent_map)],
        list(_findings(agent_map)),
        _panels(agent_map),
        agent_map.rows,
    )


def _cell_table(agent_map: AgentMap, cell: AgentCell) -> TextTable:
    rows = []
    baseline = agent_map.results.get((cell, BASELINE.title))
    bound = agent_map.bound(cell, "mean")
    for contender in agent_map.contenders:
        result = agent_map.results[cell, contender.title]
        tokens = (result.recomputed, result.copied_out, result.copied_in)
        rows.append(
            [
                contender.title,
                *(f"{value:.2f}" for value in (result.mean, result.p50, result.p99)),
                f"{result.turns:.3f}",
                f"{result.good:.3f}",
                *map(number_text, tokens),
                _ratio(result.mean, baseline and baseline.mean),
                _ratio(result.mean, bound),
            ]
        )
    columns = ["", "mean s", "p50", "p99", "turns/s", "good/s", "recomp.", "out", "in", "/lru_host", "/belady"]
    return TextTable(f"{cell}: {cell.live} live sessions, turn delay.", columns, rows)


def _win_tables(agent_map: AgentMap) -> Iterator[TextTable]:
    """Who is best in each cell by each measure, of those that know no future."""
    for measure, title in MEASURES.items() if _contending(agent_map) else ():
        for model in dict.fromkeys(cell.model for cell in agent_map.cells):
            rows = [
                [f"{host:g} ×", *(_winner(agent_map, cell, measure) for cell in _row(agent_map, model, host))]
                for host in _hosts(agent_map)
            ]
            columns = ["host / device", *(f"device {device:g} ×" for device in _devices(agent_map))]
            yield TextTable(f"{model.title}: best {title}.", columns, rows)


def _row(agent_map: AgentMap, model: AgentModel, host: float) -> list[AgentCell]:
    """The cells of a model with this host pool, by device pool."""
    cells = [cell for cell in agent_map.cells if cell.model == model and cell.host == host]
    return sorted(cells, key=lambda cell: cell.device)


def _winner(agent_map: AgentMap, cell: AgentCell, measure: str) -> str:
    """The best contender of a cell, its number over lru_host's and over the bound's."""
    if cell not in agent_map.cells:
        return "-"
    numbers = {it.title: getattr(agent_map.results[cell, it.title], measure) for it in _contending(agent_map)}
    best = max(numbers, key=numbers.__getitem__) if measure == "good" else min(numbers, key=numbers.__getitem__)
    ratios = _ratio(numbers[best], numbers.get(BASELINE.title)), _ratio(numbers[best], agent_map.bound(cell, measure))
    return f"{best} {number_text(numbers[best])} ({', '.join(ratios)})"


def _findings(agent_map: AgentMap) -> Iterator[str]:
    for measure, title in MEASURES.items() if _contending(agent_map) else ():
        wins = {
            it.title: sum(_is_best(agent_map, cell, measure, it) for cell in agent_map.cells)
            for it in _contending(agent_map)
        }
        told = ", ".join(f"{name} in {count}" for name, count in sorted(wins.items(), key=lambda item: -item[1]))
        yield f"Best {title}, or within {TIE:.0%} of it, in {len(agent_map.cells)} cells: {told}."
    for contender in OURS:
        for cell in agent_map.cells:
            if (cell, contender.title) not in agent_map.results:
                continue
            own = agent_map.results[cell, contender.title]
            baseline = agent_map.results.get((cell, BASELINE.title))
            over = _ratio(own.mean, baseline and baseline.mean), _ratio(own.mean, agent_map.bound(cell, "mean"))
            yield f"{contender.title}, {cell}: {over[0]} × lru_host's mean turn delay, {over[1]} × Bélády's."


def _is_best(agent_map: AgentMap, cell: AgentCell, measure: str, contender: Contender) -> bool:
    numbers = [getattr(agent_map.results[cell, it.title], measure) for it in _contending(agent_map)]
    own = getattr(agent_map.results[cell, contender.title], measure)
    return own >= max(numbers) * (1 - TIE) if measure == "good" else own <= min(numbers) * (1 + TIE)


def _contending(agent_map: AgentMap) -> list[Contender]:
    """Those that know no future and have no endless memory."""
    return [contender for contender in agent_map.contenders if contender not in (*BOUNDS, INFINITE)]


def _panels(agent_map: AgentMap) -> list[list[HeatMap]]:
    """For each model: the least mean delay of ours over that of lru_host and of Bélády, by device and host pools."""
    ours = [contender for contender in OURS if contender in agent_map.contenders]
    if not ours or BASELINE not in agent_map.contenders:
        return []
    rows = []
    for model in dict.fromkeys(cell.model for cell in agent_map.cells):
        over_baseline, over_bound = list[list[float | None]](), list[list[float | None]]()
        for host in _hosts(agent_map):
            cells = _row(agent_map, model, host)
            best = [_least(agent_map, cell, ours) for cell in cells]
            over_baseline.append(
                [_quotient(own, _least(agent_map, cell, [BASELINE])) for own, cell in zip(best, cells, strict=True)]
            )
            over_bound.append([_quotient(own, _bound(agent_map, cell)) for own, cell in zip(best, cells, strict=True)])
        rows.append([_heat(agent_map, f"{model.title}: copy_ahead / lru_host, mean turn delay", over_baseline)])
        rows[-1].append(_heat(agent_map, f"{model.title}: copy_ahead / Bélády", over_bound))
    return rows


def _heat(agent_map: AgentMap, title: str, values: Sequence[Sequence[float | None]]) -> HeatMap:
    return HeatMap(
        title,
        ("host pool / device pool", "device pool / contexts of the live sessions"),
        [f"{host:g}" for host in _hosts(agent_map)],
        [f"{device:g}" for device in _devices(agent_map)],
        values,
        3.0,
        framed=(1.0, 0.0),
        better="less",
    )


def _least(agent_map: AgentMap, cell: AgentCell, contenders: Sequence[Contender]) -> float | None:
    if cell not in agent_map.cells:
        return None
    return min(agent_map.results[cell, contender.title].mean for contender in contenders)


def _bound(agent_map: AgentMap, cell: AgentCell) -> float | None:
    return agent_map.bound(cell, "mean") if cell in agent_map.cells else None


def _devices(agent_map: AgentMap) -> list[float]:
    return sorted({cell.device for cell in agent_map.cells})


def _hosts(agent_map: AgentMap) -> list[float]:
    return sorted({cell.host for cell in agent_map.cells})


def _quotient(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def _ratio(value: float | None, reference: float | None) -> str:
    quotient = _quotient(value, reference)
    return "-" if quotient is None else f"{quotient:.2f}"
