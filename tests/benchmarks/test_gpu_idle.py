"""The GPU suite's engine decodes all rows in every step that it times, and says so."""

import pytest

from benchmarks.gpu_suite.kind import GPU
from benchmarks.gpu_suite.sizes import FULL
from benchmarks.suite.child import part
from benchmarks.suite.idle import prefill_steps, timed_steps
from benchmarks.suite.sizes import TINY
from jinfercept.events import Event, Token


class FakeEngine:
    """Gives one token of so many rows in each step."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = iter(rows)

    def step(self) -> list[Event]:
        return [Token(str(row), 0, "") for row in range(next(self.rows))]


@pytest.mark.slow
def test_all_rows_decode_in_every_timed_step() -> None:
    measured = list(part(GPU, "idle")(TINY))
    batch, prompt = TINY.transfer_rows
    assert [(row["depth"], row["batch"]) for row in measured] == [(0, batch), (1, batch)]
    assert all(row["context"] > prompt for row in measured), "rows generated while the others' prompts were computed"
    assert all(row["step_s"] > 0 and row["queued_s"] > 0 for row in measured)


def test_a_timed_step_with_fewer_rows_is_an_error() -> None:
    assert timed_steps(FakeEngine([4, 4]), 2, 4) >= 0
    with pytest.raises(AssertionError, match=r"steps of \[4, 3\] rows were timed, not of 4"):
        timed_steps(FakeEngine([4, 3]), 2, 4)


def test_requests_decode_until_the_last_prompt_is_computed() -> None:
    assert prefill_steps(1, 100, 32) == 4
    assert prefill_steps(2, 100, 32) == 8  # the second beside a row that decodes, in chunks of 31
    assert prefill_steps(4, 10, 4) == 3 + 4 + 5 + 10
    assert prefill_steps(*FULL.transfer_rows, FULL.policies.bucket) == 179
