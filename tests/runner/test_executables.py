"""Executables that are compiled together, by the first call that needs them, or in a thread behind the calls."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from jinfercept.runner.executables import Executables
from tests.support.pretend import quiet_after


@pytest.fixture(autouse=True)
def _compiled_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is compiled at the first moment without a call."""
    quiet_after(monkeypatch, 0.0)


class CountedSum:
    """A function that counts how often it is traced, once it may be."""

    def __init__(self) -> None:
        self.num_traces, self.may_trace, self.fails = 0, threading.Event(), False
        self.may_trace.set()

    def __call__(self, x: Float[Array, "n"], y: Float[Array, "n"]) -> Float[Array, "n"]:
        self.may_trace.wait(60)
        if self.fails:
            raise ValueError("not now")
        self.num_traces += 1
        return x + y


def added(*keys: str) -> tuple[Executables, CountedSum]:
    run, function = Executables(), CountedSum()
    for key in keys:
        run.add(key, partial(function), jnp.zeros(4), jnp.zeros(4), donate=(0,))
    return run, function


def check(run: Executables, key: str) -> None:
    np.testing.assert_array_equal(run[key](jnp.ones(4), jnp.ones(4)), np.full(4, 2.0))


def test_an_executable_is_compiled_by_the_first_call_that_needs_it_and_only_then() -> None:
    run, function = added("a", "b")
    assert (run.num_pending, function.num_traces, run.compile_s) == (2, 0, {})
    check(run, "a")
    check(run, "a")
    assert (run.num_pending, function.num_traces, list(run.compile_s)) == (1, 1, ["a"])
    with pytest.raises(KeyError):
        run["c"]


def test_threads_that_need_the_same_executable_share_one_compilation() -> None:
    run, function = added("a")
    function.may_trace.clear()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run.__getitem__, "a") for _ in range(4)]
        function.may_trace.set()
        assert len({id(future.result()) for future in futures}) == 1
    assert function.num_traces == 1


def test_the_arguments_may_be_freed_before_the_compilation() -> None:
    run, argument = Executables(), jnp.ones(4)
    run.add("twice", lambda x: 2 * x, argument)
    argument.delete()
    np.testing.assert_array_equal(run["twice"](jnp.ones(4)), np.full(4, 2.0))


def test_an_error_is_the_call_s_and_the_next_call_tries_again() -> None:
    run, function = added("a")
    function.fails = True
    for _ in range(2):
        with pytest.raises(ValueError, match="not now"):
            run["a"]
    function.fails = False
    check(run, "a")


def test_the_rest_is_compiled_in_a_thread_and_a_call_waits_for_what_it_needs() -> None:
    run, function = added("a", "b", "c")
    function.may_trace.clear()
    run.compile_behind()
    threading.Timer(0.05, function.may_trace.set).start()
    for key in ("c", "a", "b"):
        check(run, key)
    run.close()
    assert (run.num_pending, function.num_traces) == (0, 3)
    assert set(run.compile_s) == {"a", "b", "c"}


def test_closing_leaves_what_is_not_compiled_yet() -> None:
    run, function = added("a", "b", "c")
    function.may_trace.clear()
    run.compile_behind()
    while run.num_pending == 3:
        time.sleep(0.01)
    threading.Timer(0.05, function.may_trace.set).start()
    run.close()
    assert (run.num_pending, function.num_traces) == (2, 1)
    check(run, "c")


def test_nothing_is_compiled_behind_calls_that_follow_each_other_until_it_has_waited_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet_after(monkeypatch, 60.0)
    run, function = added("a", "b")
    check(run, "a")
    run.compile_behind()
    time.sleep(0.05)
    run.close()
    assert (run.num_pending, function.num_traces) == (1, 1)

    quiet_after(monkeypatch, 60.0, 0.01)
    run, function = added("a", "b")
    check(run, "a")
    run.compile_behind()
    while run.num_pending:
        time.sleep(0.01)
    run.close()
    assert function.num_traces == 2
