"""What is set before JAX's backend starts, and what stays as the user has set it."""

import os
from typing import Any

import psutil
import pytest

from jinfercept.config import EngineConfig
from jinfercept.start.backend import prepare_backend
from jinfercept.start.memory import GIB

LIMIT, PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"


def pinned(
    set_by_user: dict[str, str] | None = None, *, given: bool = False, **options: Any
) -> tuple[str | None, str | None]:
    """The limit of pinned memory and whether it is pinned at once, after a start with these options."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("XLA_", "PJRT_")):
                patch.delenv(name)
        for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", LIMIT, PREALLOCATE):
            patch.setenv(name, "")  # removed afterwards
            patch.delenv(name)
        for name, value in (set_by_user or {}).items():
            patch.setenv(name, value)
        prepare_backend(
            EngineConfig.from_options({"compilation_cache": False, "dtype": "float32", **options}), swap_is_given=given
        )
        return os.environ.get(LIMIT), os.environ.get(PREALLOCATE)


def test_the_memory_for_host_copies_is_pinned_at_once_where_the_machine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=64 * GIB))
    assert pinned(swap_space=4) == ("12", "true"), "arrays of several pages may be half empty"
    assert pinned(swap_space=4, staging_pages=1) == ("8", "true")
    assert pinned(swap_space=14) == ("32", "true")
    assert pinned(swap_space=15) == ("32", "true"), "half of what is left; the memory plan promises what that holds"
    assert pinned(swap_space=29, given=True) == ("62", "true")
    assert pinned(swap_space=30, given=True) == ("32", "true"), "the memory plan refuses it"
    assert pinned(swap_space=0)[1] is None
    assert pinned(swap_space=4, pinned_memory=False)[1] is None


def test_what_the_user_has_set_of_pinned_memory_stays() -> None:
    assert pinned({LIMIT: "100"}) == ("100", None)
    assert pinned({PREALLOCATE: "false"})[1] == "false"
    assert pinned({LIMIT: "8", PREALLOCATE: "true"}) == ("8", "true")


@pytest.mark.parametrize(("cores", "devices", "threads"), [(2, 4, "8"), (2, 2, "4"), (8, 4, None), (2, 1, None)])
def test_devices_that_wait_for_each_other_have_threads(
    cores: int, devices: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("NPROC", "")  # removed afterwards
    monkeypatch.delenv("NPROC")
    pinned(tensor_parallel_size=devices)
    assert os.environ.get("NPROC") == threads
