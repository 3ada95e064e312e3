"""What tests pretend of the machine and of time: an older CPU, packages that are missing, a quiet server."""

import sys

import pytest


def older_cpu(patch: pytest.MonkeyPatch, *more: str) -> None:
    """A CPU with AVX2, and with more features by name, but without AVX-512."""
    patch.setattr("jinfercept.cpu_kernels.native.features", lambda: frozenset({"avx2", "fma", *more}))


def missing(patch: pytest.MonkeyPatch, *packages: str, imported_by: str | None = None) -> None:
    """These packages cannot be imported; the module that imports them is read again."""
    for package in packages:
        patch.setitem(sys.modules, package, None)
    if imported_by is not None:
        patch.delitem(sys.modules, imported_by, raising=False)


def quiet_after(patch: pytest.MonkeyPatch, quiet_s: float, longest_wait_s: float = 1e9) -> None:
    """Executables that are left are compiled after so many seconds without a call, and at the latest after so many."""
    patch.setattr("jinfercept.runner.executables.QUIET_S", quiet_s)
    patch.setattr("jinfercept.runner.executables.LONGEST_WAIT_S", longest_wait_s)


def late_at_once(patch: pytest.MonkeyPatch) -> None:
    """A turn is late as soon as it waits, as the door sees it."""
    patch.setattr("jinfercept.sched.door.LATE_S", -1.0)
