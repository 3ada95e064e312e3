"""Which waiting sequence starts next: the `Order` protocol, the orders by name, and the making of one from a user's choice.

Waiting sequences are new, were preempted, or have calls that returned. By default they start by original arrival, first come
first served, and need no order. Under an `Order` they start by ascending keys. The scheduler makes two exceptions: a smaller
`priority` goes before every key, and a sequence that has waited for `queues.LONGEST_S` goes before every key of its priority.
While tenants compete, the order applies within each tenant. No order preempts running sequences.

While one tenant is served, running sequences that lack more than one token get their chunks in the same order. A sequence
whose prompt is being computed keeps its pages and its slot while sequences with smaller keys go before it.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, final

from jinfercept.sched.plugins import make_choice
from jinfercept.sched.policies import PUBLISHED, PolicyInputs
from jinfercept.sched.profile import CostModel
from jinfercept.sched.sequence import Sequence


class Order(Protocol):
    """Ranks waiting sequences. Inherit from it, or write a class with all of its members.

    An order can rely on this: calls come from one thread, in the order of events; `now` never falls; a sequence has a key
    before it starts. An order reads sequences, writes to none, and blocks on nothing.

    Every plan asks for the key of a running sequence that lacks more than one token. The key of a waiting sequence is asked
    for when its wait begins, and then again for `queues.REFRESHED` waiting sequences per plan, in turn, so that a plan costs
    the same whether ten or ten thousand wait. So a key may depend on time, but slowly.
    """

    @abstractmethod
    def key(self, sequence: Sequence, now: float) -> float:
        """A finite number. Of sequences with the same priority, the least key starts next; equal keys go by arrival."""
        ...

    def intercepted(self, sequence: Sequence) -> None:
        """A sequence begins to wait for its `calls`; `state` is still the one before. Ignored unless overridden."""
        return

    def finished(self, sequence: Sequence) -> None:
        """A sequence ends, in any state; `state` is still the one before. Ignored unless overridden."""
        return


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
