"""Shared set-up: deterministic property tests, one cache of compiled executables, the order of test files, shared models."""

import functools
import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from jinfercept.llm import LLM
    from tests.support.postgres import Postgres
    from tests.support.scripted_model import Make

from jinfercept.models.embedded import cache_directory
from tests.support import strict_arrays

# JAX reads these when it is imported. Without them, only what is compiled after a first `LLM` would be found again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_directory() / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
# Tests compile for longer than they compute. Processes that they start inherit it, but for those that compile ahead of time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Where an operation was traced is in no assertion, and a tenth of what tracing and lowering take.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

strict_arrays.check_shapes()

SLOWEST_FIRST = (
    "aot/",
    "test_several_devices",
    "test_docs",
    "benchmarks/",
    "soak/",
    "start/",
    "hosts/",
    "test_parity",
    "test_draft_model",
    "test_llm",
    "same_tokens",
    "test_state_killed",
    "test_front",
    "examples/",
    "test_tool_choice",
    "test_speculation",
    "test_structured_outputs",
    "studies/",
    "pallas/",
    "runner/",
    "engine/",
    "serve/",
)
"""Parts of the paths of files of tests, in the order in which processes begin them; the others follow."""

for profile, max_examples in (("fixed", 15), ("thorough", 500)):
    settings.register_profile(
        profile,
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Give every process of tests cores of its own: threads of XLA that share cores wait for each other."""
    place = getattr(config, "workerinput", None)
    if place is not None:
        gc.disable()  # until the tests are collected: nothing of hundreds of modules is garbage
    if place is not None and hasattr(os, "sched_setaffinity"):
        worker, count = int(place["workerid"].removeprefix("gw")), place["workercount"]
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[worker % len(cores) :: count])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first: two processes take them in this order, and end at about the same time."""
    items.sort(key=lambda item: _place(item.path))


def pytest_collection_finish() -> None:
    """Spare collections of garbage what hundreds of modules consist of, and collect seldom: one collection takes a second."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect garbage once when the tests have ended: what is frozen then, pytest's own five collections do not visit again."""
    gc.collect()
    gc.freeze()


@functools.cache
def _place(path: Path) -> int:
    """Where the tests of a file come."""
    file = path.relative_to(Path(__file__).parent).as_posix()
    return next((place for place, part in enumerate(SLOWEST_FIRST) if part in file), len(SLOWEST_FIRST))


@pytest.fixture(scope="session", autouse=True)
def _repeat_nothing() -> Iterator[None]:
    """What many tests need is made once: executables, of which none is compiled behind an engine, and clients' certificates."""
    executables = sys.modules.get("jinfercept.runner.executables")  # tests that import no JAX stay without
    clients: Any = sys.modules.get("httpx2._transports.default")
    commands: Any = getattr(sys.modules.get("tyro._docstrings"), "_ClassTokenization", None)
    with pytest.MonkeyPatch.context() as patch:
        if executables is not None:
            from tests.support.compiled_once import CompiledOnce
            from tests.support.pretend import quiet_after

            quiet_after(patch, 1e6)
            CompiledOnce(patch)
        if clients is not None:
            patch.setattr(clients, "create_ssl_context", functools.cache(clients.create_ssl_context))
        if commands is not None:
            patch.setattr(commands, "make", staticmethod(functools.cache(commands.make)))
        yield


@pytest.fixture(scope="module", autouse=True)
def _explicit_arrays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is broadcast or cast silently in tests of the rooms whose functions take arrays."""
    with strict_arrays.explicit() if request.path.parent.name in strict_arrays.ROOMS else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_mappings() -> Iterator[None]:
    """Forget what JAX has compiled before the process has the 65,530 mappings of memory that Linux allows.

    An executable of a CPU has tens of them, and a process that can map no more ends with a segmentation fault.
    """
    yield
    maps, jax = Path("/proc/self/maps"), sys.modules.get("jax")
    if jax is not None and maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def _smollm2() -> "Iterator[LLM]":
    from jinfercept.llm import LLM

    sizes: dict[str, Any] = {"kv_tokens": 1920, "max_num_seqs": 20, "max_num_batched_tokens": 64}
    with LLM("smollm2-135m", dtype="float32", profile="paper-gptj-6b-a100", lazy=True, **sizes) as llm:
        yield llm


@pytest.fixture
def smollm2(_smollm2: "LLM") -> "LLM":
    """SmolLM2 in float32 with a pool of 1,920 tokens, empty, under the policy `preserve`."""
    _smollm2.restart(policy="preserve")
    return _smollm2


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache that remembers compiled executables, but neither a profile nor a choice of layers yet."""
    cache, everyday = tmp_path / "cache", cache_directory()
    cache.mkdir()
    (everyday / "xla").mkdir(parents=True, exist_ok=True)
    (cache / "xla").symlink_to(everyday / "xla")
    monkeypatch.setenv("JINFERCEPT_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def make_scripted() -> "Iterator[Make]":
    """An LLM that writes what a script says; see `scripted_model`."""
    from tests.support.scripted_model import scripted_llm

    with scripted_llm() as make:
        yield make


@pytest.fixture(scope="session")
def postgres_server() -> "Iterator[Postgres]":
    """A PostgreSQL without tables of ours; the tests that use it are skipped where there is none."""
    from tests.support.postgres import postgres

    with postgres() as server:
        yield server


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, as at a terminal, even where the tests run in the background of a shell that ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def every_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of drafts does not depend on how busy the machine is."""
    from jinfercept.sched.speculation import Speculation

    note_step, seconds = Speculation.note_step, itertools.count()
    monkeypatch.setattr(Speculation, "note_step", lambda self, planned, now: note_step(self, planned, next(seconds)))
