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
_MOST_GROWTH = 1.1
_TOO_LONG = "context_length_exceeded"


def percentile(values: list[float], percent: int) -> float:
    """The smallest of the values that so many percent of them do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


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
        attacks: numbers by kind, of hostile clients.
        first_token_s: of streams, without hostile clients and beside them.
        resident_bytes: of the server, idle, after each round.
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
    attacks: Counter[str] = field(default_factory=Counter)
    first_token_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    resident_bytes: list[int] = field(default_factory=list)

    def note(self, kind: str, got: Got, *, attacked: bool = False) -> None:
        """How a request ended. A conversation that has become too long may be refused; nothing else that makes sense may.

        Args:
            attacked: hostile clients were there.
        """
        self.requests[kind] += 1
        if got.first_s is not None:
            self.first_token_s[attacked].append(got.first_s)
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

    def check_memory(self) -> None:
        """Compare the server's memory after the last attack with that before the first: more than 10 % is leaked."""
        before, after = self.memory
        if after > _MOST_GROWTH * before:
            self.fail("leaked", "server", f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the idle server before the attacks, which are in the second half of the rounds, and after them."""
        return self.resident_bytes[(len(self.resident_bytes) + 1) // 2 - 1], self.resident_bytes[-1]

    @property
    def first_token_ratio(self) -> float | None:
        """99th percentile of seconds to the first token beside hostile clients, by that without them."""
        alone, attacked = self.first_token_s
        return percentile(attacked, 99) / percentile(alone, 99) if alone and attacked else None

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
        if self.attacks:
            totals["hostile"] = {
                "attacks": self.attacks,
                "first_token_s": dict(zip(("alone", "attacked"), self.first_token_s, strict=True)),
                "p99_ratio": self.first_token_ratio,
                "resident_bytes": self.resident_bytes,
            }
        return totals | {"kinds": kinds, "failures": self.failures, "mcp_kills": self.kills, "held": by_round}
