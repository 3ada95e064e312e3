"""A request as the scheduler has it: token ids, a state, a context."""

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from jinfercept.kv.context import Context, ContextResidency, ContextState, ContextWindow
from jinfercept.sched.plan import GREEDY, NewPages, Sample, Score, TokenHistory, WindowEntries

if TYPE_CHECKING:
    from jinfercept.sched.speculation import DraftState


class State(Enum):
    """A request's state. One whose calls have returned waits like a new one, with some pages on the host or missing."""

    WAITING = "waiting"
    RUNNING = "running"
    INTERCEPTED = "intercepted"
    FINISHED = "finished"


CallKind = Literal["server_tool", "client_tool", "reader", "unknown_tool"]
"""Who answers a call: a tool that the server runs, for all tenants alike; a tool that the client runs; the reader of a
finished answer, who may write a follow-up; or the engine, with an error, since no tool has the name."""


class PendingCall(NamedTuple):
    """A call in flight: one that a paused sequence waits for, or an asynchronous one."""

    name: str  # name of the tool, or of the reader
    key: Hashable = None  # unique among the calls in flight
    expected_s: float | None = None  # hint of its duration in seconds; None: there is no hint
    tenant: str = ""  # whose request calls
    kind: CallKind = "server_tool"
    head_start_s: float = 0.0  # seconds that it had lasted when the sequence paused to wait for it


class CallDuration(NamedTuple):
    """A call's duration in seconds, and whether the call ended by itself (`clean`) or was cut off."""

    duration_s: float
    clean: bool = True


@dataclass(slots=True)
class RunnerRow:
    """A running sequence's row in the runner's page tables and token histories: the entries that the runner knows."""

    slot: int | None = None  # number of the row; None while the sequence does not run
    num_pages: int = 0  # number of leading pages
    window_end: int = 0  # index behind the last page in layers with windows
    state: int = 0  # slot of the states of recurrent layers; 0: none
    has_history: bool = False  # the device has the token history

    def begin(self, slot: int) -> None:
        """Run the sequence in a row of which the runner knows nothing yet."""
        self.slot, self.num_pages, self.window_end, self.state, self.has_history = slot, 0, 0, 0, False

    def new_pages(self, context: Context, num_pages: int) -> NewPages | tuple[()]:
        """Entries of the page table, up to `num_pages`, that the runner does not know yet. It knows them now."""
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
        """The context has only this many pages left."""
        self.num_pages, self.window_end = min(self.num_pages, num_pages), min(self.window_end, num_pages)


_NOWHERE = ContextResidency(0, 0, 0)


@dataclass(slots=True)
class SequenceUsage:
    """The cost of a sequence, and where its context was; written by `SchedulerCounters` and the `Scheduler`."""

    copied_out: int = 0  # tokens, like the next two
    copied_in: int = 0
    recomputed: int = 0
    preemptions: int = 0
    num_cached: int | None = None  # prompt tokens with KV on the device or the host at the first start; None before
    residency: ContextResidency = _NOWHERE  # of the context when the sequence last started to run
    retained: ContextResidency | None = None  # of the context at the first start, if it was a retained one


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One request's tokens and state, owned by the `Scheduler`; each of its parts has one writer."""

    id: str
    prompt: InitVar[Iterable[int]]
    context: Context  # its pages, written by `KVManager`; empty at first
    _: KW_ONLY
    max_tokens: int  # most tokens to generate
    sample: Sample = GREEDY  # how tokens are drawn, without the parts that change from token to token
    arrival_s: float = 0.0
    # likeliest tokens to report at each place of the prompt; None: the prompt is not scored
    num_best: int | None = None
    noted_from: int | None = None  # position of the first token whose experts are reported; None: none are
    # a sequence of the same prompt, which computes it for both; this one does not start before that
    leader: "Sequence | None" = None
    priority: int = 0  # smaller ones are served first, whenever the sequences arrived
    tenant: str = ""
    weight: float = 1.0  # of the tenant, above 0: it divides what the sequence holds
    # the chain of requests that it belongs to: as its request says, else that of the retained context that it extends, else
    # its id
    session: str = ""
    adapter: int = 0  # number of the adapter that computes it; 0: none

    tokens: "array[int]" = field(init=False)  # accepted tokens: prompt, generated, results of calls
    # ranges of tokens that the model did not generate: the prompt first, then results of calls
    external_spans: list[tuple[int, int]] = field(init=False)
    # whether the host knows what a draw depends on, or can get it for a draft
    may_draft: bool = field(init=False)
    row: RunnerRow = field(init=False, default_factory=RunnerRow)
    usage: SequenceUsage = field(init=False, default_factory=SequenceUsage)
    # When its conversation began to wait for the next token: at the request's arrival, at the return of its calls, or when an
    # aborted request that it repeats did. A conversation that waited at the door, for `door_s`, began when it came in.
    since_s: float = field(init=False)
    at_door: bool = field(init=False, default=False)
    door_s: float = field(init=False, default=0.0)
    # Its place in the queues, like `state` written by `Queues`: by arrival, smaller ones served first; 0: in no queue yet.
    # `rank` is a `queues.Rank`, in the waiting queue under an `Order`.
    order: int = field(init=False, default=0)
    rank: tuple[int, float, int] = field(init=False, default=(0, 0.0, 0))
    paused_s: float = field(init=False, default=0.0)  # when it was intercepted last, by `calls`
    calls: tuple[PendingCall, ...] = field(init=False, default=())
    awaited: tuple[PendingCall, ...] = field(init=False, default=())  # those that have not returned
    drafting: "DraftState | None" = field(init=False, default=None)  # written by `Speculation`
    state: State = field(init=False, default=State.WAITING)
    reads_disk: bool = field(init=False, default=False)  # pages are or will be read from a disk; the disk tier says so
    pending: int = field(init=False, default=0)  # samples that are planned and not collected yet
    planned: bool = field(init=False, default=False)  # has a chunk in the plan being made
    generated: int = field(init=False, default=0)
    epoch: int = field(init=False, default=0)  # grows when pending samples become void
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
        return self.usage.preemptions

    @property
    def length(self) -> int:
        """Tokens, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def wants_computation(self) -> bool:
        """Whether experts or scores of some of its tokens are still to be reported: cached KV has none."""
        noted = self.noted_from is not None and max(self.noted_from, self.max_computed) < len(self.tokens) - 1
        return noted or (self.num_best is not None and self.scored < self.external_spans[0][1] - 1)

    @property
    def waits_for_leader(self) -> bool:
        leader = self.leader
        if leader is not None and (leader.state in (State.FINISHED, State.INTERCEPTED) or leader.has_prompt):
            self.leader = leader = None
        return leader is not None

    @property
    def has_prompt(self) -> bool:
        """Whether the full pages of its prompt are computed, and not lost since."""
        num_tokens, size = self.external_spans[0][1], self.context.page_size
        return self.max_computed >= num_tokens and self.context.num_pages >= num_tokens // size

    @property
    def may_start(self) -> bool:
        """Whether it waits neither for its leader nor for a disk."""
        return not self.reads_disk and not self.waits_for_leader

    def void_pending(self) -> None:
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
