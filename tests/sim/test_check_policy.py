"""The check of policies says in words what a broken one breaks; one that raises costs the requests of one step, no page."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jinfercept.testing
from jinfercept.errors import ConfigError, PluginError
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.orders import ORDERS, Order
from jinfercept.sched.policies import SETTINGS, PolicyInputs
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sim.workload import Arrival, Script, Segment
from jinfercept.testing import PolicyCheckError, check_policy
from tests.support.fake_runner import next_token
from tests.support.scenario_run import Scenario, ScenarioRun

QUICK = ("discard", "copy_ahead")
"""Checked in every run: one that moves nothing, and one that moves in both directions."""


@pytest.mark.parametrize(
    "policy", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_every_built_in_policy_keeps_the_rules(policy: str) -> None:
    report = check_policy(policy)
    assert report.num_scenarios > 20
    assert str(report).startswith(f"{policy}: {report.num_scenarios} scenarios")


class Sound(Policy):
    """Evicts by the order of pausing; the broken ones below change a line of it."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self.paused: dict[str, Sequence] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self.paused[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self.paused.pop(sequence.id, None)

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in list(self.paused.values()):
            yield Move(sequence, sequence.context.tail_first, Action.SWAP, "a slot is needed")


class LosesReturned(Sound):
    def wait(self, sequence: Sequence) -> None:
        del self.paused[sequence.id]


class EndsRequests(Sound):
    def wait(self, sequence: Sequence) -> None:
        sequence.state = State.FINISHED


class KeepsChats(Sound):
    def victims(self, now: float) -> Iterator[Move]:
        return (move for move in super().victims(now) if not any(call.name == "chat" for call in move.sequence.calls))


class EvictsTwice(Sound):
    def victims(self, now: float) -> Iterator[Move]:
        for move in super().victims(now):
            yield from (move, move)


class AnswersNames(Sound):
    def moves(self, budget: Budget, now: float, mover: Any) -> None:
        for name in self.paused:
            mover.copy(name, "ahead")


class TakesPages(Sound):
    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        for sequence in self.paused.values():
            tail = sequence.context.tail
            tail.num_pages += 1
            tail.changed()
            mover.copy(sequence, "ahead")


class Raises(Sound):
    def resume(self, sequence: Sequence, now: float) -> None:
        del self.paused[sequence.id]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (LosesReturned, r"LosesReturned keeps page \d+ of request \d, which waits to run: `victims` ends without it"),
        (EndsRequests, r"EndsRequests breaks the engine: "),
        (KeepsChats, r"KeepsChats keeps page \d+ of request \d, which waits for its calls: .* must offer every page"),
        (EvictsTwice, r"EvictsTwice answers Action.SWAP of page \d+ of request \d twice in one order in victims"),
        (
            AnswersNames,
            r"AnswersNames moves Move\(sequence='\d', .*, which is no Move of pages of a sequence, in moves",
        ),
        (TakesPages, r"TakesPages raises AssertionError:  in moves"),
        (Raises, r"Raises raises KeyError: '\d' in resume \(test_check_policy.py, line \d+\)"),
    ],
)
def test_a_broken_policy_fails_with_what_it_breaks_and_where(policy: Callable[..., Policy], says: str) -> None:
    check = rf"^the policy {says}.*\(scenario: .*, pipeline depth [01]\)$"
    with pytest.raises(PolicyCheckError, match=check):
        check_policy(policy)


@pytest.mark.parametrize("order", [pytest.param(name, marks=pytest.mark.slow) for name in ORDERS])
def test_every_built_in_order_keeps_the_rules(order: str) -> None:
    assert check_policy("copy_ahead", order).num_scenarios > 20


class RaisesAsOrder(Order):
    def key(self, sequence: Sequence, now: float) -> float:
        return 0.0

    def finished(self, sequence: Sequence) -> None:
        raise OSError("no table")


def test_a_broken_order_is_named_with_what_it_breaks() -> None:
    says = r"raises OSError: no table in finished .*\(scenario: a pool that holds all, pipel"
    with pytest.raises(PolicyCheckError, match=f"^the order RaisesAsOrder {says}"):
        check_policy("copy_ahead", RaisesAsOrder)


@pytest.mark.slow
def test_a_policy_of_the_users_own_is_checked_in_one_line() -> None:
    assert jinfercept.testing.check_policy(Sound).policy == "Sound"


def test_an_object_and_an_unknown_name_are_refused() -> None:
    inputs: Any = None
    with pytest.raises(ConfigError, match="a check needs a new policy for each scenario"):
        check_policy(Sound(inputs))
    with pytest.raises(ConfigError, match="a check needs a new order for each scenario"):
        check_policy("copy_ahead", RaisesAsOrder())
    with pytest.raises(ConfigError, match="no such policy"):
        check_policy("lro")


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
