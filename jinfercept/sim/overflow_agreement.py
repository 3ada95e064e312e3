"""How well the simulator foretells the figures that the real engine measures: the same winner, and the same overheads."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jinfercept.sim.overflow_checks import Ways
from jinfercept.sim.overflow_figures import OverflowFigure

WANTED_WINNERS = 0.9
"""Share of the cells in which the simulator should name the way that costs less."""
WITHIN = 0.25
"""Difference of overheads, over the measured one, that counts as the same."""


class AgreementCell(NamedTuple):
    """A cell's overhead, measured and simulated."""

    figure: int
    x: float
    mode: str
    measured_s: float
    simulated_s: float

    @property
    def is_near(self) -> bool:
        """Whether the two differ by at most `WITHIN`."""
        return abs(self.simulated_s - self.measured_s) <= WITHIN * abs(self.measured_s)


class Agreement(NamedTuple):
    """The comparison of all cells.

    Attributes:
        cells: of every mode.
        same_winner, num_compared: cells in which recomputing or swapping costs less in both, of those in which the measured
            spreads of the two ways do not overlap, or there is one seed.
        num_undecided: cells in which the measured spreads overlap.
    """

    cells: Sequence[AgreementCell]
    same_winner: int
    num_compared: int
    num_undecided: int

    @property
    def num_near(self) -> int:
        """Overheads that differ by at most `WITHIN`."""
        return sum(cell.is_near for cell in self.cells)

    def __str__(self) -> str:
        winners = self.num_compared > 0 and self.same_winner >= WANTED_WINNERS * self.num_compared
        near = self.num_near == len(self.cells)
        return (
            f"{'pass' if winners else 'FAIL'}: the same winner in {self.same_winner} of {self.num_compared} cells (wanted: "
            f"{WANTED_WINNERS:.0%}), beside {self.num_undecided} in which the measured spreads overlap. "
            f"{'pass' if near else 'FAIL'}: overheads within {WITHIN:.0%} in {self.num_near} of {len(self.cells)}."
        )


def agreement(measured: Sequence[OverflowFigure], simulated: Sequence[OverflowFigure], ways: Ways) -> Agreement:
    """Compare the figures that both have, cells without overflow left out.

    Args:
        ways: recomputing and swapping, of which one wins.
    """
    cells, same, compared, undecided = list[AgreementCell](), 0, 0, 0
    for ours, theirs in _pairs(measured, simulated):
        for x, by_mode in ours.by_x.items():
            cells += [
                AgreementCell(ours.number, x, mode, point.overhead_s.mean, theirs.by_x[x][mode].overhead_s.mean)
                for mode, point in by_mode.items()
                if point.counters.preemptions
            ]
            recompute, swap = (by_mode[mode] for mode in ways)
            if not recompute.counters.preemptions:
                continue
            first, second = sorted((recompute.overhead_s, swap.overhead_s))
            if first.high >= second.low and first.high > first.low:
                undecided += 1
                continue
            compared += 1
            gap = recompute.overhead_s.mean - swap.overhead_s.mean
            priced = theirs.by_x[x][ways.recompute].overhead_s.mean - theirs.by_x[x][ways.swap].overhead_s.mean
            same += gap * priced > 0
    return Agreement(cells, same, compared, undecided)


def _pairs(
    measured: Sequence[OverflowFigure], simulated: Sequence[OverflowFigure]
) -> Iterator[tuple[OverflowFigure, OverflowFigure]]:
    by_number = {figure.number: figure for figure in simulated}
    yield from ((figure, by_number[figure.number]) for figure in measured if figure.number in by_number)
