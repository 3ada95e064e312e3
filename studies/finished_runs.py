"""The reports of finished runs in a file, from which a study that was stopped goes on."""

import json
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import final

from jinfercept.errors import ConfigError
from jinfercept.sim.run_stats import Report
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.sweep import SweepRun


@final
class FinishedRuns:
    """The reports of runs of sessions, by all that the runs are made of. A run that failed is not kept.

    Args:
        path: a file of JSON lines, which grows with every run that ends. The lines do not say which code made their reports:
            remove the file after a change of it.

    Raises:
        ConfigError: from the constructor: the file cannot be read, or has a line that is none of this class.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._digests = path, dict[int, str]()
        self._reports = dict[str, Report]()
        try:
            lines = path.read_text("utf-8").splitlines() if path.exists() else []
            for line in lines:
                entry = json.loads(line)
                self._reports[entry["run"]] = entry["report"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "remove the file, and the runs are played again"
            raise ConfigError("finished runs cannot be read", got=f"{path}: {error}", fix=fix) from None

    def report(self, run: SweepRun) -> Report | None:
        """The report of a run that has finished before; None if it has not."""
        return self._reports.get(self._key(run))

    def add(self, run: SweepRun, report: Report) -> None:
        """Keep the report of a run that has ended."""
        if "error" in report:
            return
        key = self._key(run)
        self._reports[key] = report
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": key, "report": report}) + "\n")

    def _key(self, run: SweepRun) -> str:
        load = run.load.arrivals
        assert isinstance(load, SessionLoad)
        sessions = self._digests.get(id(load.sessions))
        if sessions is None:
            sessions = self._digests[id(load.sessions)] = _digest(repr(load.sessions))
        return _digest(repr((run.simulation, run.load._replace(arrivals=replace(load, sessions=())), sessions)))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
