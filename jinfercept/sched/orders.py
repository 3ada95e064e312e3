"""The orders of waiting requests by name, and how one is made from what a user chose."""

from collections.abc import Callable, Mapping

from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.guards import guarded_plugin
from jinfercept.sched.missing_work import MissingWork
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.order import Order
from jinfercept.sched.plugins import check_name, is_place
from jinfercept.sched.policies import PolicyInputs

type OrderChoice = str | Order | type[Order] | Callable[[PolicyInputs], Order] | Callable[[], Order]
"""A name of `ORDERS`; a place, `path.py:Class` or `package.module:Class`; a class or a function, called once for every engine,
with the `PolicyInputs` if it requires an argument; or an order, for one engine."""

ORDERS: Mapping[str, Callable[[PolicyInputs], Order | None]] = {
    "fcfs": lambda inputs: None,
    "missing_work": MissingWork,
}
"""The orders by the name that selects them. First come first served, by original arrival, is None: the queues keep it."""


def make_order(choice: OrderChoice, inputs: PolicyInputs) -> Order | None:
    """Make an order; one that is not built in is guarded. None: first come first served.

    Raises:
        ConfigError: no order has the name, its `patience` is no number of overtakings, or as `build_plugin`.
    """
    if isinstance(choice, str) and not is_place(choice):
        check_name("order", choice, ORDERS)
        return ORDERS[choice](inputs)
    return guarded_plugin("order", choice, Order, (MissingWork,), inputs)


def check_order_choice(choice: OrderChoice) -> None:
    """Raise `ConfigError` unless an order can be made of a choice. A class is tried on published prices."""
    profile = PROFILES["paper-gptj-6b-a100"]
    make_order(choice, PolicyInputs(profile, profile.saturation, 16, ElapsedEstimator()))
