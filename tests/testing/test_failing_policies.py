"""A policy that raises, in whatever call, costs the requests of one step: no page is lost, and later ones have their tokens."""

from collections.abc import Callable, Iterator

import pytest

from jinfercept.errors import PluginError
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.workload import Script, Segment
from jinfercept.testing.fake_runner import next_token
from jinfercept.testing.scenarios import Scenario, ScenarioRun


class Counted(Mover):
    """Calls a function after every move."""

    def __init__(self, mover: Mover, moved: Callable[[], None]) -> None:
        self._mover, self._moved = mover, moved

    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        answer = self._mover.move(sequence, action, why, pages)
        self._moved()
        return answer


class FailsOnce(Policy):
    """`lru_host` whose method of this name raises when it is called for the fifth time."""

    def __init__(self, method: str) -> None:
        self._inner = LeastRecentlyUsed(writes_through=True)
        self._left = {method: 5}

    def _count(self, method: str) -> None:
        if method in self._left:
            self._left[method] -= 1
            if not self._left[method]:
                raise OSError("no disk")

    def pause(self, sequence: Sequence, now: float) -> None:
        self._count("pause")
        self._inner.pause(sequence, now)

    def wait(self, sequence: Sequence) -> None:
        self._count("wait")

    def resume(self, sequence: Sequence, now: float) -> None:
        self._count("resume")
        self._inner.resume(sequence, now)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._inner.moves(budget, now, Counted(mover, lambda: self._count("moves")))

    def victims(self, now: float) -> Iterator[Move]:
        for move in self._inner.victims(now):
            yield move
            self._count("victims")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        self._count("host_victims")
        return self._inner.host_victims(sequence, now)


METHODS = ("pause", "wait", "resume", "moves", "victims", "host_victims")
SLOW = [pytest.param(method, (place + 1) % 2, marks=pytest.mark.slow) for place, method in enumerate(METHODS)]


@pytest.mark.parametrize(("method", "depth"), [*((method, place % 2) for place, method in enumerate(METHODS)), *SLOW])
def test_a_policy_that_raises_loses_no_page_and_no_later_request(method: str, depth: int) -> None:
    script = Script("chat", 13, (Segment(3, 0.2, 6), Segment(3, 0.2, 6), Segment(4, None, 0)))
    coming = tuple(Arrival(0.05 * number, script) for number in range(24))
    run = ScenarioRun(Scenario(coming, lambda: FailsOnce(method), depth=depth, num_host_pages=4)).run()
    assert {str(failure).partition(" (")[0] for failure in run.failures} == {
        f"the policy FailsOnce raises OSError: no disk in {method}"
    }
    assert all(isinstance(failure, PluginError) for failure in run.failures)
    served = [output for output in run.outputs.values() if output.outputs[0].finish_reason == "length"]
    assert len(run.outputs) == 24
    assert len(served) == 24 - len(run.failures) > 8
    for output in served:
        stream = output.outputs[0].token_ids
        assert stream[-1] == next_token([*output.prompt_token_ids, *stream[:-1]])
