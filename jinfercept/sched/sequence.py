"""A request as the scheduler has it: token ids, a state, a context."""

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from jinfercept.kv.context import Context, ContextResidency, ContextState, ContextWindow
from jinfercept.sched.draft_state import DraftState
from jinfercept.sched.plan import GREEDY, NewPages, Sample, Score, TokenHistory, WindowEntries


class State(Enum):
    """A request's state. One whose calls have returned waits like a new one, with some pages on the host or missing."""

    WAITING = "waiting"
    RUNNING = "running"
    INTERCEPTED = "intercepted"
    FINISHED = "finished"


CallKind = Literal["server_tool", "client_tool", "reader", "unknown_tool"]
"""Who answers a call: a tool that the server runs, for all tenants alike; a tool that the client runs; the reader of a finished
answer, who may write a follow-up; or the engine, with an error, since no tool has the name."""


class PendingCall(NamedTuple):
    """A call in flight: one that a paused sequence waits for, or an asynchronous one.

    Attributes:
        name: of the tool, or of the reader.
        key: unique among the calls in flight.
        expected_s: hint of its duration in seconds; None if there is none.
        tenant: whose request calls.
        kind: who answers it.
        head_start_s: seconds that the call had lasted when the sequence paused to wait for it.
    """

    name: str
    key: Hashable = None
    expected_s: float | None = None
    tenant: str = ""
    kind: CallKind = "server_tool"
    head_start_s: float = 0.0


class CallDuration(NamedTuple):
    """A call's duration in seconds, and whether the call ended by itself (`clean`) or was cut off."""

    duration_s: float
    clean: bool = True


@dataclass(slots=True)
class RunnerRow:
    """What the runner knows of a running sequence: its row in the page tables and in the token histories.

    Attributes:
        slot: number of the row; None while the sequence does not run.
        num_pages: its leading pages whose device slots the runner knows.
        window_end: index behind the last of its pages in layers with windows whose device slots the runner knows.
        state: slot of its states of recurrent layers that the runner knows; 0: none.
        has_history: the device has its token history.
    """

    slot: int | None = None
    num_pages: int = 0
    window_end: int = 0
    state: int = 0
    has_history: bool = False

    def begin(self, slot: int) -> None:
        """The sequence runs in this row, of which the runner knows nothing yet."""
        self.slot, self.num_pages, self.window_end, self.state, self.has_history = slot, 0, 0, 0, False

    def new_pages(self, context: Context, num_pages: int) -> NewPages | tuple[()]:
        """Entries of the page table, up to so many, that the runner does not know yet; it knows them now."""
        first, window, entries, state, state_from = self.num_pages, context.side, (), 0, 0
        if isinstance(window, ContextState):
            state, state_from = window.slot, window.source
        elif window is not None:
            entries = self._new_window(window)
        if first >= num_pages and not entries and not state_from and state == self.state:
            return ()
        self.num_pages, self.state = max(first, num_pages), state
        return NewPages(first, context.slots(first, num_pages), state, entries, state_from)

    def _new_window(self, window: ContextWindow) -> WindowEntries | tuple[()]:
        first, end = max(self.window_end, window.first), window.end
        if first >= end:
            return ()
        self.window_end = end
        return WindowEntries(first, window.slots[first - window.first :])

    def cut(self, num_pages: int) -> None:
        """The context has only so many pages left."""
        self.num_pages, self.window_end = min(self.num_pages, num_pages), min(self.window_end, num_pages)


_NOWHERE = ContextResidency(0, 0, 0)


@dataclass(slots=True)
class SequenceUsage:
    """What a sequence has cost and where its context was; written by `SchedulerCounters` and the `Scheduler`.

    Attributes:
        copied_out, copied_in, recomputed: tokens.
        preemptions: how often it was preempted.
        num_cached: prompt tokens with KV on the device or the host at its first start; None before.
        residency: of its context when it last started to run.
        retained: of its context at its first start, if it extends a retained context.
    """

    copied_out: int = 0
    copied_in: int = 0
    recomputed: int = 0
    preemptions: int = 0
    num_cached: int | None = None
    residency: ContextResidency = _NOWHERE
    retained: ContextResidency | None = None


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One request's tokens and state, owned by the `Scheduler`; each of its parts has one writer.

    `tokens` are the accepted ones: prompt, generated, and results of calls. `pending` counts samples that are planned and not
    collected yet. `epoch` grows whenever pending samples become void, by an interception, by an injected result or by the end.
    `external_spans` are the ranges of tokens that the model did not generate: the prompt first, then results of calls.
    `session` names the chain of requests that it belongs to: by its request, else that of the retained context that it extends,
    else its own id. `may_draft` says whether its tokens may be drafted: what a draw depends on is known to the host, or to be
    had for a draft. `reads_disk` says that pages of it are being read from a disk, or will be; written by the disk tier.

    `since_s` is when its conversation began to wait for the next token: at its arrival, at the return of its calls, or when an
    aborted request that it repeats did; of a conversation that waited at the door (`at_door`), for `door_s`, when it came in.

    `paused_s` is when it was intercepted last, `calls` those that intercepted it then, and `awaited` those of them that have
    not returned.

    Its place in the queues, written by `Queues`, as `state` is: `order` by arrival, where smaller is served
    first and 0 has been in no queue yet. `rank` is in the waiting queue under an `Order`: a `queues.Rank`.

    The parts: `context` has the pages (`KVManager`), `row` is the runner's, `usage` counts, `drafting` has the drafts of its
    next tokens (`Speculation`).

    Args:
        prompt: its tokens.
        context: empty.
        max_tokens: tokens to generate at most.
        sample: how its tokens are drawn, but for what changes from token to token.
        num_best: likeliest tokens to report at each place of the prompt; None: the prompt is not scored.
        noted_from: position of the first token whose experts are reported; None: those of none are.
        leader: a sequence of the same prompt, which computes it for both; this one does not start before that.
        priority: smaller ones are served first, in whatever order the sequences arrived.
        tenant: whose use the sequence counts to.
        weight: of the tenant, above 0: what the sequence holds counts divided by it.
        session: of its request; "" for none.
        adapter: number of the adapter that computes it; 0: none.
    """

    id: str
    prompt: InitVar[Iterable[int]]
    context: Context
    _: KW_ONLY
    max_tokens: int
    sample: Sample = GREEDY
    arrival_s: float = 0.0
    num_best: int | None = None
    noted_from: int | None = None
    leader: "Sequence | None" = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    session: str = ""
    adapter: int = 0

    tokens: "array[int]" = field(init=False)
    external_spans: list[tuple[int, int]] = field(init=False)
    may_draft: bool = field(init=False)
    row: RunnerRow = field(init=False, default_factory=RunnerRow)
    usage: SequenceUsage = field(init=False, default_factory=SequenceUsage)
    since_s: float = field(init=False)
    at_door: bool = field(init=False, default=False)
    door_s: float = field(init=False, default=0.0)
    order: int = field(init=False, default=0)
    rank: tuple[int, float, int] = field(init=False, default=(0, 0.0, 0))
    paused_s: float = field(init=False, default=0.0)
    calls: tuple[PendingCall, ...] = field(init=False, default=())
    awaited: tuple[PendingCall, ...] = field(init=False, default=())
    drafting: DraftState | None = field(init=False, default=None)
    state: State = field(init=False, default=State.WAITING)
    reads_disk: bool = field(init=False, default=False)
    pending: int = field(init=False, default=0)
    planned: bool = field(init=False, default=False)  # has a chunk in the plan being made
    generated: int = field(init=False, default=0)
    epoch: int = field(init=False, default=0)
    max_computed: int = field(init=False, default=0)  # tokens whose KV was ever computed
    scored: int = field(init=False, default=0)  # tokens of the prompt whose successors' scores were planned

    def __post_init__(self, prompt: Iterable[int]) -> None:
        self.tokens = array("i", prompt)
        self.external_spans = [(0, len(self.tokens))]
        self.session, self.since_s = self.session or self.id, self.arrival_s
        options = self.sample.options
        self.may_draft = options is None or not (options.remembered or options.params.forced_output_ids)

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return self.usage.preemptions

    @property
    def length(self) -> int:
        """Tokens, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def wants_computation(self) -> bool:
        """Whether experts or scores are still wanted of some of its tokens: cached KV does not do."""
        noted = self.noted_from is not None and max(self.noted_from, self.max_computed) < len(self.tokens) - 1
        return noted or (self.num_best is not None and self.scored < self.external_spans[0][1] - 1)

    @property
    def waits_for_leader(self) -> bool:
        """Whether its leader has still to compute their prompt."""
        leader = self.leader
        if leader is not None and (leader.state in (State.FINISHED, State.INTERCEPTED) or leader.has_prompt):
            self.leader = leader = None
        return leader is not None

    @property
    def has_prompt(self) -> bool:
        """Whether the full pages of its prompt are computed, or were and are not lost since."""
        num_tokens, size = self.external_spans[0][1], self.context.page_size
        return self.max_computed >= num_tokens and self.context.num_pages >= num_tokens // size

    @property
    def may_start(self) -> bool:
        """Whether it waits neither for its leader nor for a disk."""
        return not self.reads_disk and not self.waits_for_leader

    def void_pending(self) -> None:
        """Void the samples in flight."""
        self.pending = 0
        self.epoch += 1

    def append_external(self, tokens: list[int]) -> None:
        """Append tokens that the model did not generate."""
        self.external_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens.extend(tokens)

    def draw(self) -> Sample:
        """How to draw the next token; with the token history, if the device does not have it under this slot."""
        options = self.sample.options
        if options is None:
            return self.sample
        history = None
        if options.remembered and not self.row.has_history:
            assert not self.pending, "the host does not know what the device has to remember"
            history, self.row.has_history = TokenHistory(tuple(self.tokens), tuple(self.external_spans)), True
        number, params = self.generated + self.pending, options.params
        forced = params.forced_output_ids[number] if number < len(params.forced_output_ids) else None
        return self.sample._replace(forbids_end=number < params.min_tokens, history=history, forced=forced)

    def score(self, start: int, end: int) -> Score | None:
        """The prompt's tokens that a chunk of the tokens `start … end - 1` scores; None if there are none."""
        first, last = max(start, self.scored), min(end, self.external_spans[0][1] - 1)
        if self.num_best is None or first >= last:
            return None
        self.scored = last
        return Score(first - start, tuple(self.tokens[first + 1 : last + 1]), self.num_best)

    def __repr__(self) -> str:
        return f"Sequence({self.id} {self.state.value} {len(self.tokens)}+{self.pending} tokens, ready {self.context.ready})"
