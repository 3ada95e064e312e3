"""The orders of waiting requests by name, and the making of an order from a user's choice."""

from collections.abc import Callable, Mapping
from typing import final

from jinfercept.sched.cost import CostModel
from jinfercept.sched.guards import make_choice
from jinfercept.sched.order import Order
from jinfercept.sched.policies import PUBLISHED, PolicyInputs
from jinfercept.sched.sequence import Sequence

LONGER = 120.0
"""A request may be overtaken by requests that arrive within this many times the seconds of its missing work."""


@final
class PositionPrice:
    """Seconds of computing parts of a context, from the steps that compute it whole: attention makes later tokens dearer."""

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost, self._chunk_tokens = cost, chunk_tokens
        self._whole_s = [0.0]  # seconds of computing the first chunks, by their number

    def between_s(self, start: int, end: int) -> float:
        """Seconds of computing the tokens `start … end - 1` of a context whose earlier tokens are there."""
        return self._first_s(end) - self._first_s(start)

    def _first_s(self, num_tokens: int) -> float:
        chunks, rest = divmod(num_tokens, self._chunk_tokens)
        seconds = self._chunks_s(chunks)
        return seconds + (self._chunks_s(chunks + 1) - seconds) * rest / self._chunk_tokens if rest else seconds

    def _chunks_s(self, number: int) -> float:
        whole_s = self._whole_s
        while len(whole_s) <= number:
            whole_s.append(self._cost.recompute_s(len(whole_s) * self._chunk_tokens, self._chunk_tokens))
        return whole_s[number]


@final
class MissingWork(Order):
    """Ascending `since + LONGER · missing`, in seconds; of two requests with equal work the earlier one goes first.

    `since` is when the conversation began to wait (`Sequence.since_s`). `missing` is the work that the request lacks:
    computing the tokens that are in neither memory, at their positions, and fetching those on the host. A page that is
    evicted while the request waits is missing work, too.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._cost, self._price = inputs.cost, PositionPrice(inputs.cost, inputs.saturation)

    def key(self, sequence: Sequence, now: float) -> float:
        return sequence.since_s + LONGER * self.missing_s(sequence)

    def missing_s(self, sequence: Sequence) -> float:
        """Seconds of the work that a sequence lacks for its next token."""
        length, context = sequence.length, sequence.context
        gaps, host_tokens = context.lacks(length)
        return sum([self._price.between_s(start, end) for start, end in gaps]) + self._cost.swap_s(host_tokens)


type OrderChoice = str | Order | type[Order] | Callable[[PolicyInputs], Order] | Callable[[], Order]
"""A name of `ORDERS`; a place, `path.py:Class` or `package.module:Class`; a class or a function, called once for every engine,
with the `PolicyInputs` if it requires an argument; or an order, for one engine."""

ORDERS: Mapping[str, Callable[[PolicyInputs], Order | None]] = {
    "fcfs": lambda inputs: None,
    "missing_work": MissingWork,
}
"""The orders by the name that selects them. First come first served, by original arrival, is None: the queues keep it."""


def make_order(choice: OrderChoice, inputs: PolicyInputs) -> Order | None:
    """Make an order, guarded unless it is built in. Raises `ConfigError` if no order has the name, or as `make_choice`."""
    return make_choice("order", choice, ORDERS, Order, (MissingWork,), inputs)


def check_order_choice(choice: OrderChoice) -> None:
    """Raise `ConfigError` unless an order can be made of a choice. A class is tried on published prices."""
    make_order(choice, PUBLISHED)
