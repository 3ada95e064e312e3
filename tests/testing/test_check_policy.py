"""The check of policies passes every built-in one, and says in words what a broken one breaks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jinfercept.testing
from jinfercept.errors import ConfigError
from jinfercept.sched.order import Order
from jinfercept.sched.orders import ORDERS
from jinfercept.sched.policies import SETTINGS, PolicyInputs
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State
from jinfercept.testing import PolicyCheckError, check_policy

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
        (EndsRequests, r"EndsRequests writes to request \d in `wait`: its state; it may only read"),
        (KeepsChats, r"KeepsChats keeps page \d+ of request \d, which waits for its calls: .* must offer every page"),
        (EvictsTwice, r"EvictsTwice answers Action.SWAP of page \d+ of request \d twice in one order in victims"),
        (
            AnswersNames,
            r"AnswersNames moves Move\(sequence='\d', .*, which is no Move of pages of a sequence, in moves",
        ),
        (TakesPages, r"TakesPages writes to request \d in `moves`: its pages; it may only read"),
        (Raises, r"Raises raises KeyError: '\d' in resume \(test_check_policy.py, line \d+\)"),
    ],
)
def test_a_broken_policy_fails_with_what_it_breaks_and_where(policy: Callable[..., Policy], says: str) -> None:
    check = rf"the policy {says}.*\(scenario: .*, pipeline depth [01]\)$"
    with pytest.raises(PolicyCheckError, match=check):
        check_policy(policy)


@pytest.mark.parametrize("order", [pytest.param(name, marks=pytest.mark.slow) for name in ORDERS])
def test_every_built_in_order_keeps_the_rules(order: str) -> None:
    assert check_policy("copy_ahead", order).num_scenarios > 20


class WritesAsOrder(Order):
    def key(self, sequence: Sequence, now: float) -> float:
        sequence.priority -= 1
        return 0.0


class RaisesAsOrder(Order):
    def key(self, sequence: Sequence, now: float) -> float:
        return 0.0

    def finished(self, sequence: Sequence) -> None:
        raise OSError("no table")


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (
            WritesAsOrder,
            r"WritesAsOrder writes to request \d in `key`: its order; it may only read \(scenario: a pool that",
        ),
        (
            RaisesAsOrder,
            r"RaisesAsOrder raises OSError: no table in finished .*\(scenario: a pool that holds all, pipel",
        ),
    ],
)
def test_a_broken_order_is_named_with_what_it_breaks(order: type[Order], says: str) -> None:
    with pytest.raises(PolicyCheckError, match=f"^the order {says}"):
        check_policy("copy_ahead", order)


@pytest.mark.slow
def test_a_policy_of_the_users_own_is_checked_in_one_line() -> None:
    assert jinfercept.testing.check_policy(Sound).policy == "Sound"


def test_an_object_and_an_unknown_name_are_refused() -> None:
    inputs: Any = None
    with pytest.raises(ConfigError, match="a check needs a new policy for each scenario"):
        check_policy(Sound(inputs))
    with pytest.raises(ConfigError, match="a check needs a new order for each scenario"):
        check_policy("copy_ahead", WritesAsOrder())
    with pytest.raises(ConfigError, match="no such policy"):
        check_policy("lro")
