"""The check of orders passes the built-in ones, and says in words what a broken one breaks."""

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sched.order import Order
from jinfercept.sched.orders import ORDERS
from jinfercept.sched.sequence import Sequence
from jinfercept.testing import OrderCheckError, check_order


@pytest.mark.parametrize("order", ["fcfs", *(pytest.param(n, marks=pytest.mark.slow) for n in ORDERS if n != "fcfs")])
def test_every_built_in_order_keeps_the_rules(order: str) -> None:
    report = check_order(order)
    assert report.num_scenarios > 20
    assert str(report).startswith(f"{order}: {report.num_scenarios} scenarios")
    assert (report.num_overtaken > 0) == (order != "fcfs")


class Writes(Order):
    def key(self, sequence: Sequence, now: float) -> float:
        sequence.priority -= 1
        return 0.0


class Raises(Order):
    def key(self, sequence: Sequence, now: float) -> float:
        return 0.0

    def finished(self, sequence: Sequence) -> None:
        raise OSError("no table")


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (
            Writes,
            r"the order Writes writes to request \d in `key`: its counts; it may only read \(scenario: a pool that",
        ),
        (
            Raises,
            r"the order Raises raises OSError: no table in finished .*\(scenario: a pool that holds all, pipeline",
        ),
    ],
)
def test_a_broken_order_is_named_with_what_it_breaks(order: type[Order], says: str) -> None:
    with pytest.raises(OrderCheckError, match=says):
        check_order(order)


def test_an_object_is_refused_since_every_scenario_needs_a_new_one() -> None:
    with pytest.raises(ConfigError, match="a check needs a new order for each scenario"):
        check_order(Writes())
