"""What tests pretend of the machine and of time: an older CPU, missing packages, a quiet server, a device that is gone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.engine.meter.request_log import Passed
from jinfercept.runner.packing import pack


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


@contextmanager
def failing_steps(after: int = 0, kind: type[BaseException] = RuntimeError) -> Iterator[None]:
    """Every step of a model's runner raises but the first `after`."""
    left = iter(range(after))

    def packed(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise kind("the device is gone")
        return pack(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jinfercept.runner.runner.pack", packed)
        yield


@contextmanager
def failing_counts() -> Iterator[None]:
    """Engines that begin meanwhile fail in every pass, when it is counted."""

    def fold(stats: EngineStats, event: object) -> None:
        if isinstance(event, Passed):
            raise ArithmeticError("cannot count")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineStats, "fold", fold)
        yield
