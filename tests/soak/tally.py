"""What a soak has tried and what became of it: counted by kind, with the first failures in full. Sends nothing."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.soak.client import Got
from tests.soak.watch import Held

Failure = Literal["lost", "hung", "leaked", "wrong"]
FAILURES: tuple[Failure, ...] = ("lost", "hung", "leaked", "wrong")
MOST_SHOWN = 20
_SLACK = Held(requests=0, pages=0, tasks=4, threads=4, files=4)
"""What may be held at the end beyond what was held before: pools of threads that had not been needed in full."""
_TOO_LONG = "context_length_exceeded"


@dataclass(slots=True)
class Tally:
    """Of one soak.

    Attributes:
        visits, requests, answered, left, refused, checked, ties: numbers by kind of visit.
        rewritten: follow-ups that are not checked, since what is asked alone has other tokens of the same text.
        failed: numbers by kind of failure and of visit.
        failures: the first of them, in words.
        holdings: of the server after each round.
        kills: of MCP servers.
    """

    visits: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    ties: Counter[str] = field(default_factory=Counter)
    rewritten: Counter[str] = field(default_factory=Counter)
    failed: Counter[tuple[Failure, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    holdings: list[Held] = field(default_factory=list)
    kills: int = 0

    def note(self, kind: str, got: Got) -> None:
        """How a request ended. A conversation that has become too long may be refused; nothing else that makes sense may."""
        self.requests[kind] += 1
        if got.end == "answered":
            self.answered[kind] += 1
        elif got.end == "left":
            self.left[kind] += 1
        elif got.end == "refused" and (kind == "nonsense" or _TOO_LONG in got.detail):
            self.refused[kind] += 1
        else:
            self.fail("hung" if got.end == "hung" else "lost", kind, got.detail)

    def fail(self, failure: Failure, kind: str, why: str) -> None:
        """Count a failure."""
        self.failed[failure, kind] += 1
        if len(self.failures) < MOST_SHOWN:
            self.failures.append(f"{failure}, {kind}: {why}")

    def total(self, failure: Failure) -> int:
        """Failures of one kind."""
        return sum(number for (name, _), number in self.failed.items() if name == failure)

    def losses(self) -> str:
        """Failures by kind."""
        return ", ".join(f"{self.total(failure)} {failure}" for failure in FAILURES)

    def settle(self, holding: Held) -> None:
        """What the server holds after a round: requests and pages are leaked at once."""
        self.holdings.append(holding)
        if holding.requests or holding.pages:
            self.fail(
                "leaked", "server", f"{holding.requests} requests and {holding.pages} pages after all had been answered"
            )

    def check_growth(self) -> None:
        """Compare the last round with the first half of them: what grew on since then is leaked."""
        if len(self.holdings) < 2:
            return
        early, last = self.holdings[: (len(self.holdings) + 1) // 2], self.holdings[-1]
        for name, slack in _SLACK._asdict().items():
            before, now = max(getattr(holding, name) for holding in early), getattr(last, name)
            if slack and now > before + slack:
                self.fail("leaked", "server", f"{name} grew from {before} to {now}")

    @property
    def clean(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        names = ("visits", "requests", "answered", "left", "refused", "checked", "ties", "rewritten")
        totals: dict[str, Any] = {failure: self.total(failure) for failure in FAILURES}
        kinds = {kind: {name: getattr(self, name)[kind] for name in names} for kind in self.visits}
        for (failure, kind), number in self.failed.items():
            kinds.setdefault(kind, {})[failure] = number
        by_round = [holding._asdict() for holding in self.holdings]
        return totals | {"kinds": kinds, "failures": self.failures, "mcp_kills": self.kills, "held": by_round}
