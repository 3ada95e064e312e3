"""What came of a chaos: counts of requests, kills, and the stored responses that clients were promised. See `chaos.py`."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

_SHOWN = 5


class Kill(NamedTuple):
    """A process that was killed.

    Attributes:
        what: `replica`, `controller`, `front` or `database`.
        at_s: seconds after the beginning.
        recovery_s: until all replicas served again, or the database answered; None: not before the end.
    """

    what: str
    at_s: float
    recovery_s: float | None


class Promise(NamedTuple):
    """What a client knows of a stored response.

    Attributes:
        id: of the response.
        text: its answer, once the client has seen its end; None: it has seen its begin only.
    """

    id: str
    text: str | None


@dataclass
class Outcome:
    """Counts of all requests; several threads add to it."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    promises: dict[str, Promise] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def failed(self) -> bool:
        """Whether anything happened that must not."""
        return bool(self.wrong or self.unnamed or self.lost or self.left or self.counts["hung"])

    def count(self, what: str) -> None:
        """One more request ended so."""
        with self._lock:
            self.counts[what] += 1

    def note(self, notes: list[str], text: str) -> None:
        """Add a text to `wrong`, `unnamed` or `lost`."""
        with self._lock:
            notes.append(text[:300])

    def promise(self, promise: Promise) -> None:
        """A client has seen a stored response, or its end."""
        with self._lock:
            self.promises[promise.id] = promise

    def show(self) -> None:
        """Print the tables."""
        table = Table(title="requests")
        table.add_column("outcome")
        table.add_column("number", justify="right")
        seen = {"stored responses seen to begin": len(self.promises)}
        seen["of these seen to end"] = sum(promise.text is not None for promise in self.promises.values())
        bad = {
            "wrong tokens": self.wrong,
            "errors without a name": self.unnamed,
            "stored responses lost": self.lost,
            "processes left": self.left,
        }
        for name, number in (*sorted(self.counts.items()), *seen.items(), *((k, len(v)) for k, v in bad.items())):
            table.add_row(name, str(number))
        console = Console()
        console.print(table)
        kills = Table(title="kills")
        for name in ("what", "at", "serves again after"):
            kills.add_column(name, justify="right")
        for kill in self.kills:
            after = "-" if kill.recovery_s is None else f"{kill.recovery_s:.1f} s"
            kills.add_row(kill.what, f"{kill.at_s:.1f} s", after)
        console.print(kills)
        for notes in bad.values():
            for text in notes[:_SHOWN]:
                console.print(text, markup=False)
