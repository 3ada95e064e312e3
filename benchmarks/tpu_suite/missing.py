"""What this machine lacks for the suite.

    python -m benchmarks.tpu_suite.missing [--tiny]

Prints a line for each thing; the exit status is 1 if no part can run, with `--tiny` without a TPU.
"""

import sys
from pathlib import Path

from benchmarks.suite.missing import Missing, installed_version, packages, print_missing, room

NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Files of the devices that Linux has for TPUs, by generation."""


def missing() -> list[Missing]:
    """Everything that is missing, what matters most first."""
    lacking = packages()
    if installed_version("libtpu") is None:
        lacking.append(Missing("libtpu (pip install 'jinfercept[tpu]')", "every part but with --tiny", True, False))
    if not any(any(Path("/").glob(pattern.removeprefix("/"))) for pattern in NODES):
        lacking.append(Missing(f"a TPU ({' or '.join(NODES)})", "perhaps every part but with --tiny"))
    return sorted([*lacking, *room()], key=lambda lack: not lack.fatal)


if __name__ == "__main__":
    sys.exit(print_missing(missing()))
