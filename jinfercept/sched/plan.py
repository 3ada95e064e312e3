"""A complete, printable description of one iteration. The scheduler makes it, a runner executes it, a simulator prices it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jinfercept.kv.page import PageCopy
from jinfercept.sampling_params import SamplingParams

FROM_DEVICE = -1
"""A chunk's token that only the device knows: the last one sampled in the chunk's sequence slot."""

FROM_DRAFT_MODEL = -2
"""A draft that the runner's draft model has yet to make."""

NOT_FINITE = -3
"""Stands for a drawn token where the largest logit is NaN or infinite."""

NOTHING_ALLOWED = -4
"""Stands for a drawn token where the largest logit is minus infinity."""

Masks = Mapping[int, Any]
"""The tokens that constrained rows may draw, by the row's place among a plan's sampled rows: an array of uint32 words, in
which bit `v % 32` of word `v // 32` allows token `v`. A row without a mask may draw every token."""


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The part of a request's parameters that changes or reports its draws."""

    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()  # tokens that may not be drawn before `min_tokens`
    # the device keeps state under the request's slot: token counts, biases, allowed and bad tokens
    remembered: bool = False

    @property
    def filtered(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` limit the draws."""
        params = self.params
        return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


class TokenHistory(NamedTuple):
    """The tokens of a sequence when it gets a slot."""

    tokens: tuple[int, ...]  # prompt, generated tokens and results of calls
    external_spans: tuple[tuple[int, int], ...]  # ranges that the model did not generate: the prompt and the results


def draw_options(params: SamplingParams, end_token_ids: frozenset[int]) -> DrawOptions | None:
    """The options of a request; None if it has none besides temperature and random key."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    remembered = bool(
        penalties or params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens
    )
    options = DrawOptions(params, tuple(sorted(end_token_ids)) if params.min_tokens else (), remembered)
    needed = remembered or options.filtered or params.reports_draws or params.forced_output_ids
    return options if needed else None


class Sample(NamedTuple):
    """How a chunk's next token is drawn.

    Attributes:
        random_key: 64 bits. With the new token's place in the sequence they give the draw's random numbers.
        options: None: none besides temperature and random key.
        forbids_end: no end token may be drawn, since the request has not generated `min_tokens`.
        history: the sequence's tokens, if its slot is new to the device and an option depends on them.
        forced: the token that is drawn whatever the logits are; None: any.
    """

    temperature: float
    random_key: int
    options: DrawOptions | None = None
    forbids_end: bool = False
    history: TokenHistory | None = None
    forced: int | None = None


GREEDY = Sample(0.0, 0)
"""Draws the token with the largest logit."""


class Score(NamedTuple):
    """The tokens of a prompt whose log probabilities a chunk's logits give."""

    first: int  # the chunk's first token whose successor is scored, counted from the chunk's start
    targets: tuple[int, ...]  # that successor, and those of the tokens after it
    num_best: int  # likeliest tokens to report for each target


class WindowEntries(NamedTuple):
    """Consecutive entries, from number `first` on, of the page table of layers with a window, which have their own pool."""

    first: int
    slots: Sequence[int]


class NewPages(NamedTuple):
    """Consecutive entries, from number `first` on, of a page table."""

    first: int
    slots: Sequence[int]
    state: int = 0  # slot of the sequence's states of recurrent layers; 0 where the model has none
    # entries of layers with a window, where these have a pool of their own; those of pages that the chunk's first token no
    # longer sees may be stale
    window: WindowEntries | tuple[()] = ()
    # slot of the states before the chunk, if the chunk reads these and writes its own; 0: it reads its own
    state_from: int = 0

    def joined(self, following: "NewPages") -> "NewPages":
        window, behind = self.window, following.window
        if window and behind:
            behind = WindowEntries(window.first, array("i", [*window.slots, *behind.slots]))
        return self._replace(slots=array("i", [*self.slots, *following.slots]), window=behind or window)


class Chunk(NamedTuple):
    """Consecutive query tokens of one sequence.

    Decoding is a chunk of one token, and of drafts behind it. In a model with recurrent layers, accepted drafts of the last
    step come before them, since the state has not seen these.

    Attributes:
        slot: the sequence's slot in the runner's page tables.
        start: position of the first token.
        tokens: token ids, or `(FROM_DEVICE,)`.
        new_pages: entries of the page table that the runner does not know yet.
        sample: how to draw the next token from the last one's logits; None: no draw.
        num_drafts: number of drafts at the end of `tokens`; all of them are known, or all are `FROM_DRAFT_MODEL`. The token
            at each draft's position is drawn too, from the logits before it, and one more after the last draft. So the chunk
            has `1 + num_drafts` sampled rows, drawn alike.
        adapter: number of the adapter that computes it, from 1 on; 0: the model without one.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    new_pages: NewPages | tuple[()]
    sample: Sample | None
    score: Score | None = None
    num_drafts: int = 0
    adapter: int = 0

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def before_drafts(self) -> tuple[int, ...]:
        return self.tokens[: len(self.tokens) - self.num_drafts]

    @property
    def awaits_drafts(self) -> bool:
        """Whether the runner's draft model has to make the drafts."""
        return self.num_drafts > 0 and self.tokens[-1] == FROM_DRAFT_MODEL


class WindowCopies(NamedTuple):
    """The copies and drops of a `StepPlan` for layers with a window. Device and host slots have numbers of their own."""

    offload: Sequence[PageCopy] = ()
    fetch: Sequence[PageCopy] = ()
    drop: tuple[int, ...] = ()


class DraftPlan(NamedTuple):
    """The work of the drafting layer behind a plan's draws. It reads every token with the one that follows it."""

    drafts: bool  # it drafts the tokens behind every draw; else it only keeps its keys and values complete
    following: Mapping[int, int]  # by slot, the token behind a chunk that draws none


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, executed in two phases: forward (fetch, drop, offload, compute, scatter), then sample.

    Attributes:
        number: counts the plans of one scheduler.
        bucket: query tokens of the executable that runs the chunks; 0 if there are none.
        chunks: those of one token first.
        offload: pages copied to the host, as they were before this plan's compute.
        fetch: pages copied from the host beside the compute, and written to their device slots behind it. They are readable
            from the next plan on.
        drop: host slots whose arrays are freed.
        window: copies of layers with a window, where these have a pool of their own; None: nothing moves.
        draft: work of the layer that drafts, in models that have one; None: it computes nothing.
    """

    number: int
    bucket: int
    chunks: tuple[Chunk, ...] = ()
    offload: Sequence[PageCopy] = ()
    fetch: Sequence[PageCopy] = ()
    drop: tuple[int, ...] = ()
    window: WindowCopies | None = None
    draft: DraftPlan | None = None

    @property
    def awaits_drafts(self) -> bool:
        """Whether the runner's draft model has to make drafts."""
        return FROM_DRAFT_MODEL in [chunk.tokens[-1] for chunk in self.chunks if chunk.num_drafts]

    @property
    def num_tokens(self) -> int:
        """Query tokens, without padding."""
        return sum([len(chunk.tokens) for chunk in self.chunks])

    def __bool__(self) -> bool:
        return bool(self.chunks or self.offload or self.fetch or self.drop or any(self.window or ()))


class TokenLogprobs(NamedTuple):
    """The report of a drawn or scored token."""

    logprob: float  # by the model's own logits
    rank: int  # 1 if no token is likelier
    best: tuple[tuple[int, float], ...]  # the likeliest tokens in its place, with their log probabilities
    # its log probability in the distribution that it was drawn from; None: not asked for
    processed: float | None = None
    kept: Any = None  # the tokens that it could be, one of `outputs.KeptTokens.sets`; None: all, or not asked for


class TokenExperts(Protocol):
    """The experts that compute consecutive tokens, in each layer that has experts."""

    def of(self, place: int, count: int) -> "TokenExperts":
        """The experts of `count` of the tokens, from a place among them on."""
        ...

    def placed(self, pieces: Sequence[tuple[int, Any]], num_tokens: int) -> Any:
        """An array `[tokens, layers, experts]` of numbers of experts, -1 where none are known.

        `pieces` are experts with the positions of their first tokens; later ones replace earlier ones.
        """
        ...


class StepResult(NamedTuple):
    """The tokens of a plan. A log probability is NaN where a logit is NaN or plus infinity.

    Attributes:
        tokens: one per sampled row, in the plan's order: one per sampled chunk, and one more for each of its drafts.
            `NOT_FINITE` or `NOTHING_ALLOWED` stands where none could be drawn.
        elapsed_s: from the dispatch of the forward pass until the tokens were read.
        logprobs: one per sampled row, None where the request asks for none; empty if no request asks for any.
        scores: one tuple per chunk with a score, in the plan's order, with one entry per target.
        experts: of all query tokens, in the plan's order; None if the runner does not return them.
        drafts: of every sampled chunk, the drafts behind its draws; empty if the plan has none made.
    """

    tokens: tuple[int, ...]
    elapsed_s: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    experts: TokenExperts | None = None
    drafts: tuple[tuple[int, ...], ...] = ()


class PlanRunner[Forward, Ticket](Protocol):
    """Executes plans in order, each in two phases, without knowing requests.

    Only `collect` waits for the device, and `forward` for the drafts of a draft model, if the plan awaits some.
    """

    def forward(self, plan: StepPlan) -> Forward:
        """Dispatch the plan's page transfers and its forward pass. The plan before it must have been sampled.

        If chunks of the plan await drafts of a draft model, the returned object has them as `drafts`, in order.
        """
        ...

    def sample(self, forward: Forward, masks: Masks) -> Ticket:
        """Dispatch the sampling of the plan whose forward pass was dispatched last; `masks` limit its constrained rows."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the plan's tokens."""
        ...

    def reset(self) -> None:
        """Forget all KV and every plan that was not collected, after a step has failed."""
        ...
