"""A request as the scheduler sees it: token ids, a state, a context. Knows no text, no tools and no clock."""

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from jinfercept.kv.context import Context, Found


class State(Enum):
    """Where a request stands. A returning request waits like any other, with some pages missing or on the host."""

    WAITING = "waiting"
    RUNNING = "running"
    INTERCEPTED = "intercepted"
    FINISHED = "finished"


class PendingCall(NamedTuple):
    """A call that a paused sequence waits for: whom it asks, a key of its own, and how long its caller says it will take."""

    name: str
    key: Hashable
    expected_s: float | None = None


class Ended(NamedTuple):
    """How a call ended: after so many seconds, and by itself (`clean`) or because it was given up."""

    duration_s: float
    clean: bool = True


class Sequence:
    """One request's tokens and place; mutable, owned by the `Scheduler`.

    `tokens` are the accepted ones: prompt, generated and returned. `pending` counts samples that were planned and are not
    read yet. `incarnation` grows whenever pending samples become void (an interception, an end).
    """

    __slots__ = (
        "arrival_s",
        "calls",
        "context",
        "copied_in",
        "copied_out",
        "found",
        "generated",
        "high_water",
        "id",
        "incarnation",
        "max_tokens",
        "num_cached",
        "order",
        "paused_s",
        "pending",
        "planned",
        "preemptions",
        "recomputed",
        "seed",
        "slot",
        "state",
        "table",
        "temperature",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: str,
        tokens: list[int],
        context: Context,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        arrival_s: float = 0.0,
    ) -> None:
        self.id = sequence_id
        self.tokens = tokens
        self.context = context
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.seed = seed
        self.arrival_s = arrival_s
        self.order = 0  # place in the queues; smaller is served first
        self.state = State.WAITING
        self.slot: int | None = None
        self.table: list[int] = []  # device slots that the runner knows under `slot`
        self.pending = 0
        self.planned = False  # has a chunk in the plan being made
        self.generated = 0
        self.incarnation = 0
        self.paused_s = 0.0  # when it was intercepted
        self.calls: tuple[PendingCall, ...] = ()  # and by what
        self.high_water = 0  # tokens whose KV was ever computed
        self.num_cached = 0  # prompt tokens adopted from others at first admission
        self.found = Found(0, 0, 0)  # when it last started to run
        self.copied_out = 0
        self.copied_in = 0
        self.recomputed = 0
        self.preemptions = 0

    @property
    def length(self) -> int:
        """Tokens, those sampled and not yet read included."""
        return len(self.tokens) + self.pending

    @property
    def wants_token(self) -> bool:
        """Whether another sample is within `max_tokens`."""
        return self.generated + self.pending < self.max_tokens

    def __repr__(self) -> str:
        return f"Sequence({self.id} {self.state.value} {len(self.tokens)}+{self.pending} tokens, ready {self.context.ready})"
