"""How well the simulator foretells the figures that the real engine measures: the same winner, and the same overheads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jinfercept.sim.reports import Range
from studies.overflow.checks import Ways
from studies.overflow.figures import OverflowFigure, OverflowPoint
from studies.overflow.modes import AUTO

WANTED_WINNERS = 0.9
"""Share of the cells in which the simulator should name the way that costs less."""
WITHIN = 0.25
"""Difference of overheads, over the measured one, that counts as the same."""


class AgreementCell(NamedTuple):
    """A cell's overhead, measured and simulated."""

    figure: int
    x: float
    mode: str
    measured_s: Range
    simulated_s: float

    @property
    def is_resolved(self) -> bool:
        """Whether the seeds differ by less than `WITHIN` from their mean; one seed shows no difference."""
        mean, low, high = self.measured_s
        return max(mean - low, high - mean) <= WITHIN * abs(mean)

    @property
    def is_near(self) -> bool:
        """Whether the two differ by at most `WITHIN`."""
        mean = self.measured_s.mean
        return abs(self.simulated_s - mean) <= WITHIN * abs(mean)


class Agreement(NamedTuple):
    """The comparison of all cells.

    Attributes:
        cells: of every mode.
        same_winner, num_compared: pairs of recomputing and a way of swapping in a cell of which the same one costs less in
            both, of those whose measured ranges do not overlap.
        num_undecided: pairs whose measured ranges overlap.
    """

    cells: Sequence[AgreementCell]
    same_winner: int
    num_compared: int
    num_undecided: int

    @property
    def resolved(self) -> Sequence[AgreementCell]:
        """The cells whose measurement is more exact than what it is compared by."""
        return [cell for cell in self.cells if cell.is_resolved]

    @property
    def num_near(self) -> int:
        """Resolved overheads that differ by at most `WITHIN`."""
        return sum(cell.is_near for cell in self.resolved)

    def __str__(self) -> str:
        winners = self.num_compared > 0 and self.same_winner >= WANTED_WINNERS * self.num_compared
        resolved = len(self.resolved)
        near = self.num_near == resolved > 0
        rest = len(self.cells) - resolved
        return (
            f"{'pass' if winners else 'FAIL'}: the same winner in {self.same_winner} of {self.num_compared} comparisons of a "
            f"way of swapping with recomputing (wanted: {WANTED_WINNERS:.0%}), beside {self.num_undecided} in which the "
            f"measured ranges overlap. {'pass' if near else 'FAIL'}: overheads within {WITHIN:.0%} in {self.num_near} of "
            f"{resolved} cells, beside {rest} whose seeds differ by more than {WITHIN:.0%} (of these "
            f"{sum(cell.is_near for cell in self.cells) - self.num_near} are as near)."
        )


def agreement(measured: Sequence[OverflowFigure], simulated: Sequence[OverflowFigure], ways: Ways) -> Agreement:
    """Compare the figures that both have, cells without overflow left out.

    Args:
        ways: their recomputation is compared with every way of swapping.
    """
    cells, same, compared, undecided = list[AgreementCell](), 0, 0, 0
    for number, x, ours, theirs in _cells(measured, simulated):
        cells += [
            AgreementCell(number, x, mode, point.overhead_s, theirs[mode].overhead_s.mean)
            for mode, point in ours.items()
        ]
        for swap in ours.keys() - {ways.recompute, AUTO.name}:
            first, second = sorted((ours[ways.recompute].overhead_s, ours[swap].overhead_s))
            if first.high >= second.low and first.high > first.low:
                undecided += 1
                continue
            compared += 1
            same += _gap(ours, ways.recompute, swap) * _gap(theirs, ways.recompute, swap) > 0
    return Agreement(cells, same, compared, undecided)


Cell = tuple[int, float, Mapping[str, OverflowPoint], Mapping[str, OverflowPoint]]


def _cells(measured: Sequence[OverflowFigure], simulated: Sequence[OverflowFigure]) -> Iterator[Cell]:
    """The figure, x, and measured and simulated points by mode of every cell in which a request was preempted."""
    by_number = {figure.number: figure for figure in simulated}
    for figure in measured:
        theirs = by_number[figure.number].by_x if figure.number in by_number else {}
        for x, points in figure.by_x.items():
            if x in theirs and all(point.counters.preemptions for point in points.values()):
                yield figure.number, x, points, theirs[x]


def _gap(points: Mapping[str, OverflowPoint], first: str, other: str) -> float:
    return points[first].overhead_s.mean - points[other].overhead_s.mean
