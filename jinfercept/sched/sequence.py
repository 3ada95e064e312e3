"""A request as the scheduler sees it: token ids, a state, a context. Knows no text, no tools and no clock."""

from collections.abc import Hashable
from enum import Enum
from typing import Literal, NamedTuple

from jinfercept.kv.context import Context, Found
from jinfercept.sched.plan import Sample, Score
from jinfercept.sched.sampling_options import DrawOptions, TokenHistory


class State(Enum):
    """Where a request stands. A returning request waits like any other, with some pages missing or on the host."""

    WAITING = "waiting"
    RUNNING = "running"
    INTERCEPTED = "intercepted"
    FINISHED = "finished"


CallKind = Literal["server_tool", "client_tool", "reader", "unknown_tool"]
"""Who answers a call: a tool that the server runs, for all tenants alike; one that the client runs; the reader of a finished
answer; or, of a name that no tool has, an error message."""


class PendingCall(NamedTuple):
    """A call that a paused sequence waits for.

    Attributes:
        name: of the tool, or of the reader.
        key: tells it from all other calls in flight.
        expected_s: seconds that it takes, if its caller says so.
        tenant: on whose behalf it is made.
        kind: who answers it.
    """

    name: str
    key: Hashable = None
    expected_s: float | None = None
    tenant: str = ""
    kind: CallKind = "server_tool"


class CallDuration(NamedTuple):
    """How a call ended: after so many seconds, and by itself (`clean`) or because it was given up."""

    duration_s: float
    clean: bool = True


class Sequence:
    """One request's tokens and place; mutable, owned by the `Scheduler`.

    `tokens` are the accepted ones: prompt, generated and returned. `pending` counts samples that were planned and are not
    read yet. `epoch` grows whenever pending samples become void (an interception, an end). `external_spans` are the ranges of
    tokens that the model did not generate: the prompt first, then results of tools.
    """

    __slots__ = (
        "adopted",
        "arrival_s",
        "calls",
        "context",
        "copied_in",
        "copied_out",
        "epoch",
        "external_spans",
        "found",
        "generated",
        "id",
        "leader",
        "max_computed",
        "max_tokens",
        "num_best",
        "num_cached",
        "options",
        "order",
        "paused_s",
        "pending",
        "planned",
        "preemptions",
        "priority",
        "recomputed",
        "remembered",
        "scored",
        "seed",
        "slot",
        "state",
        "table",
        "temperature",
        "tenant",
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
        options: DrawOptions | None = None,
        num_best: int | None = None,
        leader: "Sequence | None" = None,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        """A sequence that waits.

        Args:
            options: what shapes its draws besides the temperature.
            num_best: likeliest tokens to report beside each of the prompt's; None: nothing is reported.
            leader: a sequence of the same prompt, which computes it for both; this one does not start before.
            priority: a smaller one is served first, whenever the sequence arrived.
            tenant: on whose behalf it runs.
        """
        self.id = sequence_id
        self.tokens = tokens
        self.context = context
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.seed = seed
        self.arrival_s = arrival_s
        self.options = options
        self.num_best = num_best
        self.leader = leader
        self.external_spans = [(0, len(tokens))]
        self.remembered = False  # the device knows its history, under `slot`
        self.scored = 0  # tokens of the prompt whose successors' scores were planned
        self.priority = priority
        self.tenant = tenant
        self.order = 0  # place in the queues; smaller is served first
        self.state = State.WAITING
        self.slot: int | None = None
        self.table: list[int] = []  # device slots that the runner knows under `slot`
        self.pending = 0
        self.planned = False  # has a chunk in the plan being made
        self.generated = 0
        self.epoch = 0
        self.paused_s = 0.0  # when it was intercepted
        self.calls: tuple[PendingCall, ...] = ()  # and by what
        self.max_computed = 0  # tokens whose KV was ever computed
        self.num_cached: int | None = None  # prompt tokens that were there already when it first started to run
        self.adopted: Found | None = None  # where they were, and how many were lost, if it goes on from a kept one
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

    @property
    def wants_scores(self) -> bool:
        """Whether tokens of its prompt are still to be scored: it has to compute them itself."""
        return self.num_best is not None and self.scored < self.external_spans[0][1] - 1

    @property
    def follows(self) -> bool:
        """Whether it waits for its leader to compute their prompt."""
        leader = self.leader
        if leader is not None and (
            leader.state is State.FINISHED or leader.max_computed >= leader.external_spans[0][1]
        ):
            self.leader = leader = None
        return leader is not None

    def draw(self, position: int) -> Sample:
        """How the token at `position` is drawn, with whatever the device does not know yet."""
        options = self.options
        if options is None:
            return Sample(self.temperature, self.seed, position)
        history = None
        if options.remembered and not self.remembered:
            assert not self.pending, "the host does not know what the device has to remember"
            history, self.remembered = TokenHistory(tuple(self.tokens), tuple(self.external_spans)), True
        held = self.generated + self.pending < options.params.min_tokens
        return Sample(self.temperature, self.seed, position, options, held, history)

    def score(self, start: int, end: int) -> Score | None:
        """What a chunk of the tokens `start … end - 1` has to report."""
        first, last = max(start, self.scored), min(end, self.external_spans[0][1] - 1)
        if self.num_best is None or first >= last:
            return None
        self.scored = last
        return Score(first - start, tuple(self.tokens[first + 1 : last + 1]), self.num_best)

    def __repr__(self) -> str:
        return f"Sequence({self.id} {self.state.value} {len(self.tokens)}+{self.pending} tokens, ready {self.context.ready})"
