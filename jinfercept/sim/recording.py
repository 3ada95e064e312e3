"""Names of the files of decision records where a command plays several runs. None stands for no file."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path


def run_path(path: str | None, name: str) -> str | None:
    """The file of one of several runs: the run's name stands before the suffix, with `_` for slashes and colons."""
    if path is None:
        return None
    place, name = Path(path), re.sub(r"[^\w.-]+", "_", name)
    return str(place.with_name(f"{place.stem}-{name}{place.suffix}"))


def name_files(paths: Iterable[str | None]) -> None:
    """Print the names of the files that several runs have written, which the user did not choose."""
    for path in paths:
        if path is not None and Path(path).exists():
            print(f"written: {path}", file=sys.stderr)
