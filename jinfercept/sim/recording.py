"""Records of a run: a decision log, a Chrome trace, or both, opened and closed together."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from jinfercept.kv.manager import KVManager
from jinfercept.meter.request_log import LogEvent
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sim.chrome_trace import ChromeTrace
from jinfercept.sim.decision_records import DecisionLog


class RecordFiles(NamedTuple):
    """Files to write: decision records, and a Chrome trace. None: not written."""

    decisions: str | None = None
    """write every decision to this file (see `jinfercept bench decisions`)"""
    chrome_trace: str | None = None
    """write a trace to this file, to be opened in Perfetto"""

    def __bool__(self) -> bool:
        return self.decisions is not None or self.chrome_trace is not None

    def of(self, name: str) -> Self:
        """The files of one of several runs: the run's name stands before each suffix, with `_` for slashes and colons."""
        name = re.sub(r"[^\w.-]+", "_", name)
        return self._replace(
            decisions=self.decisions and _insert(self.decisions, name),
            chrome_trace=self.chrome_trace and _insert(self.chrome_trace, name),
        )


NO_RECORDS = RecordFiles()


def name_files(records: Iterable[RecordFiles]) -> None:
    """Print the names of the files that several runs have written, which the user did not choose."""
    for path in (path for each in records for path in each if path is not None and Path(path).exists()):
        print(f"written: {path}", file=sys.stderr)


def files_of(path: str) -> list[str]:
    """The file; if there is none of this name, the files that several runs have written instead (`RecordFiles.of`)."""
    place = Path(path)
    several = () if place.exists() else place.parent.glob(f"{escape(place.stem)}-*{escape(place.suffix)}")
    return sorted(map(str, several)) or [path]


def _insert(path: str, name: str) -> str:
    place = Path(path)
    return str(place.with_name(f"{place.stem}-{name}{place.suffix}"))


@final
class Recording:
    """Writes all files of a run: a fold over its log.

    Args:
        now: the engine's clock.
        kv: its pages.
        known: cost model, saturation point, page size and estimator of the policy.
        estimator: a new one of the policy's kind.
        synchronous: steps wait for transfers.
        run: names and numbers of the run.

    Raises:
        ConfigError: a file cannot be written.
    """

    def __init__(
        self,
        records: RecordFiles,
        now: Callable[[], float],
        kv: KVManager,
        inputs: PolicyInputs,
        estimator: Estimator,
        *,
        synchronous: bool,
        run: Mapping[str, Any],
    ) -> None:
        self.estimator = inputs.estimator
        self._parts: list[DecisionLog | ChromeTrace] = []
        if records.decisions is not None:
            log = DecisionLog(records.decisions, now, inputs, estimator, synchronous=synchronous, run=run)
            self.estimator = log.estimator
            self._parts.append(log)
        if records.chrome_trace is not None:
            self._parts.append(
                ChromeTrace(records.chrome_trace, now, kv, inputs.cost, inputs.saturation, synchronous=synchronous)
            )

    def fold(self, event: LogEvent) -> None:
        for part in self._parts:
            part.fold(event)

    def close(self) -> None:
        """Write open records and close the files."""
        for part in self._parts:
            part.close()
