"""Runs an order of waiting requests through the scenarios of `check_policy`, and counts who overtakes whom."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, final

from jinfercept.sched.guards import guard
from jinfercept.sched.order import Order
from jinfercept.sched.orders import OrderChoice, check_order_choice
from jinfercept.sched.plugins import label
from jinfercept.sched.sequence import Sequence
from jinfercept.testing.policy_check import check_no_object, play, scenarios


class OrderCheckError(AssertionError):
    """An order breaks a rule of `Order`."""


class OrderReport(NamedTuple):
    """The runs of a check.

    Attributes:
        order: its name.
        num_keys: keys that the scheduler asked for.
        num_overtaken: starts of requests before an earlier one of their tenant.
    """

    order: str
    num_scenarios: int
    num_keys: int
    num_overtaken: int

    def __str__(self) -> str:
        return (
            f"{self.order}: {self.num_scenarios} scenarios, {self.num_keys:,} keys; {self.num_overtaken:,} times a request "
            f"started before an earlier one, and every request was served, with the tokens that it has when it is alone"
        )


def check_order(order: OrderChoice) -> OrderReport:
    """Check that an order keeps the rules of `Order`: finite keys, nothing written, every request served.

    The scenarios are those of `check_policy`, at both pipeline depths, under `copy_ahead`. Takes a second or two.

    Args:
        order: as for `LLM`, but no object, since every scenario needs a new one.

    Returns:
        Counts, and a line of text when printed.

    Raises:
        OrderCheckError: what the order broke, and in which scenario. It is an `AssertionError`.
        ConfigError: there is no such order, or it cannot be made.
    """
    check_no_object("order", order, Order)
    check_order_choice(order)
    name, num_keys, num_overtaken, num_scenarios = label(order), 0, 0, 0

    def watch(made: Order) -> WatchedOrder:
        return WatchedOrder(guard("order", made, Order, name), name)

    for title, scenario in scenarios():
        for depth in (0, 1):
            trial = replace(scenario, order=order, depth=depth)
            title_of_trial = f"{title}, pipeline depth {depth}"
            _, watched = play(f"order {name}", title_of_trial, trial, watch, OrderCheckError, "wrap_order")
            num_scenarios += 1
            if watched is not None:  # first come first served has no order
                num_keys, num_overtaken = num_keys + watched.num_keys, num_overtaken + watched.num_overtaken
    return OrderReport(name, num_scenarios, num_keys, num_overtaken)


@final
class WatchedOrder(Order):
    """Passes everything on, and raises `OrderCheckError` where the order writes to a sequence.

    Attributes:
        problem: the first rule that was broken.
        num_keys: keys that were asked for.
        num_overtaken: see `OrderReport`.
    """

    def __init__(self, order: Order, name: str) -> None:
        self.patience, self.in_seconds = order.patience, order.in_seconds
        self.problem: OrderCheckError | None = None
        self.num_keys = self.num_overtaken = 0
        self._order, self._name = order, name

    def key(self, sequence: Sequence, now: float) -> float:
        self.num_keys += 1
        return self._unwritten("key", sequence, lambda: self._order.key(sequence, now))

    def intercepted(self, sequence: Sequence) -> None:
        self._unwritten("intercepted", sequence, lambda: self._order.intercepted(sequence))
        self.num_overtaken += sequence.place.overtaken

    def finished(self, sequence: Sequence) -> None:
        self._unwritten("finished", sequence, lambda: self._order.finished(sequence))
        self.num_overtaken += sequence.place.overtaken

    def _unwritten[T](self, method: str, sequence: Sequence, call: Callable[[], T]) -> T:
        before = _state_of(sequence)
        answer = call()
        changed = [name for name, value in _state_of(sequence).items() if value != before[name]]
        if changed:
            written = f"the order {self._name} writes to request {sequence.id} in `{method}`: its {', '.join(changed)}"
            self.problem = self.problem or OrderCheckError(f"{written}; it may only read")
            raise self.problem
        return answer


def _state_of(sequence: Sequence) -> dict[str, object]:
    """The fields of a sequence that an order can see."""
    counts = (sequence.pending, sequence.generated, sequence.max_tokens, sequence.place.overtaken, sequence.priority)
    return {
        "state": sequence.state,
        "order": (sequence.order, sequence.place.rank),
        "tokens": len(sequence.tokens),
        "counts": counts,
        "calls": (sequence.calls, sequence.awaited),
        "pages": sequence.context.runs(),
    }
