"""A complete, printable description of one iteration. Made by the scheduler, executed by a runner, priced by a simulator."""

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
"""In the place of a drawn token: the largest logit is NaN or infinite."""

NOTHING_ALLOWED = -4
"""In the place of a drawn token: the largest logit is minus infinity."""

Masks = Mapping[int, Any]
"""The tokens that constrained rows may draw, by the row's place among a plan's sampled rows: an array of uint32 words, in
which bit `v % 32` of word `v // 32` allows token `v`. A row without a mask may draw every token."""


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The part of a request's parameters that changes or reports its draws.

    Attributes:
        end_token_ids: tokens that may not be drawn before `min_tokens`.
        remembered: the device keeps state by the request's slot: token counts, biases, allowed and bad tokens.
    """

    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    remembered: bool = False

    @property
    def filtered(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` limit the draws."""
        params = self.params
        return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


class TokenHistory(NamedTuple):
    """The tokens of a sequence at the time it gets a slot.

    Attributes:
        tokens: prompt, generated, and results of calls.
        external_spans: ranges that the model did not generate, in order: the prompt, results of calls.
    """

    tokens: tuple[int, ...]
    external_spans: tuple[tuple[int, int], ...]


def draw_options(params: SamplingParams, end_token_ids: frozenset[int]) -> DrawOptions | None:
    """The options of a request; None if it has none besides temperature and random key.

    Args:
        end_token_ids: tokens that would end the request.
    """
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
        random_key: 64 bits, from which the draw's random numbers come, with the new token's place in the sequence.
        options: sampling options besides temperature, random key and position.
        forbids_end: end tokens are forbidden, since the request has not generated `min_tokens`.
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
"""The token with the largest logit is drawn."""


class Score(NamedTuple):
    """The tokens of a prompt whose log probabilities a chunk's logits give.

    Attributes:
        first: the chunk's first token whose successor is scored, counted from the chunk's start.
        targets: that successor, and those of the tokens after it.
        num_best: likeliest tokens to report for each.
    """

    first: int
    targets: tuple[int, ...]
    num_best: int


class WindowEntries(NamedTuple):
    """Consecutive entries of the page table of layers with a window.

    Attributes:
        first: number of the first entry.
        slots: device slots in the pool of these layers.
    """

    first: int
    slots: Sequence[int]


class NewPages(NamedTuple):
    """Consecutive entries of a page table.

    Attributes:
        slots: the device slots.
        state: slot of the sequence's states of recurrent layers; 0 where the model has none.
        state_from: slot of the states before the chunk, where that is another one: the chunk reads these and writes its own. 0:
            it reads its own.
        window: new entries of the table of layers with a window, where these have a pool of their own. Those of pages that the
            chunk's first token does not see any more may be stale.
    """

    first: int
    slots: Sequence[int]
    state: int = 0
    window: WindowEntries | tuple[()] = ()
    state_from: int = 0

    def joined(self, following: "NewPages") -> "NewPages":
        """These entries, and those that follow them."""
        window, behind = self.window, following.window
        if window and behind:
            behind = WindowEntries(window.first, array("i", [*window.slots, *behind.slots]))
        return self._replace(slots=array("i", [*self.slots, *following.slots]), window=behind or window)


class Chunk(NamedTuple):
    """Consecutive query tokens of one sequence. Decoding is a chunk of one, or of one and drafts of the tokens after it; in a
    model with recurrent layers also of the drafts before it that were accepted, which the state has not seen.

    Attributes:
        slot: the sequence's slot in the runner's page tables.
        start: position of the first token.
        tokens: token ids, or `(FROM_DEVICE,)`.
        new_pages: entries of the page table that the runner does not know yet.
        sample: how to draw the next token from the last one's logits; None: nothing is drawn.
        score: tokens of the prompt to score; None: none.
        num_drafts: the last so many tokens are drafts, all of them known or all `FROM_DRAFT_MODEL`. The token at each draft's
            position is drawn too, from the logits before it, and after the last draft one more: the chunk has `1 + num_drafts`
            sampled rows, which are drawn alike.
        adapter: number of the adapter that computes it, from 1 on; 0: the model as it is.
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
        """The drafted tokens, in order."""
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def before_drafts(self) -> tuple[int, ...]:
        """The tokens before the drafts."""
        return self.tokens[: len(self.tokens) - self.num_drafts]

    @property
    def awaits_drafts(self) -> bool:
        """Whether the runner's draft model has to make the drafts."""
        return self.num_drafts > 0 and self.tokens[-1] == FROM_DRAFT_MODEL


class WindowCopies(NamedTuple):
    """Copies of pages of layers with a window, as those of a `StepPlan`; device and host slots have numbers of their own."""

    offload: Sequence[PageCopy] = ()
    fetch: Sequence[PageCopy] = ()
    drop: tuple[int, ...] = ()


class DraftPlan(NamedTuple):
    """What the layer that drafts does behind a plan's draws. It reads every token with the one that follows it.

    Attributes:
        drafts: whether it drafts the tokens behind every draw; else it only keeps its keys and values complete.
        following: by slot, the token behind a chunk that draws none.
    """

    drafts: bool
    following: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, executed in two phases: forward (fetch, drop, offload, compute, scatter), then sample.

    Attributes:
        number: counts the plans of one scheduler.
        bucket: query tokens of the executable that runs the chunks; 0 if there are none.
        chunks: the query tokens, chunks of one token first.
        offload: pages copied to the host, as they were before this plan's compute.
        fetch: pages copied from the host beside the compute, and written to their device slots behind it: they are readable
            from the next plan on.
        drop: host slots whose arrays are freed.
        window: the same of layers with a window, where these have a pool of their own; None: nothing moves.
        draft: of the layer that drafts, in models that have one; None: it computes nothing.
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
        """Whether the runner's draft model has to make drafts of the plan."""
        return FROM_DRAFT_MODEL in [chunk.tokens[-1] for chunk in self.chunks if chunk.num_drafts]

    @property
    def num_tokens(self) -> int:
        """Query tokens, without padding."""
        return sum([len(chunk.tokens) for chunk in self.chunks])

    def __bool__(self) -> bool:
        return bool(self.chunks or self.offload or self.fetch or self.drop or any(self.window or ()))


class TokenLogprobs(NamedTuple):
    """What is reported of a drawn or scored token.

    Attributes:
        logprob, rank: its log probability by the model's own logits, and its rank (1: none is likelier).
        best: the likeliest tokens in its place, with their log probabilities.
        processed: its log probability in the distribution that it was drawn from; None if that was not asked for.
        kept: the tokens that it could be, one of `outputs.KeptTokens.sets`; None: all of them, or not asked for.
    """

    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]
    processed: float | None = None
    kept: Any = None


class TokenExperts(Protocol):
    """Which experts compute consecutive tokens, in each layer that has some."""

    def of(self, place: int, count: int) -> "TokenExperts":
        """Those of some of the tokens, from a place among them on."""
        ...

    def placed(self, pieces: Sequence[tuple[int, Any]], num_tokens: int) -> Any:
        """An array `[tokens, layers, experts]` of numbers of experts, -1 where none are known.

        Args:
            pieces: experts with the positions of their first tokens; later ones replace earlier ones.
        """
        ...


class StepResult(NamedTuple):
    """The tokens of a plan.

    Attributes:
        tokens: one per sampled row, in the plan's order: one per sampled chunk, and one more for each of its drafts;
            `NOT_FINITE` or `NOTHING_ALLOWED` where none could be drawn.
        elapsed_s: seconds from the dispatch of the forward pass until the tokens were read.
        logprobs: one per sampled row, None where the request asks for none; empty if no request asks for any.
        scores: one tuple per chunk with a score, in the plan's order, with one entry per target.
        experts: of all query tokens, in the plan's order; None if the runner does not return them.
        drafts: of every sampled chunk, those of the tokens behind its draws; empty if the plan has none made.

    A log probability is NaN where a logit is NaN or plus infinity.
    """

    tokens: tuple[int, ...]
    elapsed_s: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    experts: TokenExperts | None = None
    drafts: tuple[tuple[int, ...], ...] = ()


class PlanRunner[Forward, Ticket](Protocol):
    """Executes plans in order, each in two phases, without knowing requests. Only `collect` waits for the device, and
    `forward` where the plan awaits drafts of a draft model, for these."""

    def forward(self, plan: StepPlan) -> Forward:
        """Dispatch the plan's page transfers and its forward pass. The plan before it must have been sampled.

        Where the plan awaits drafts of a draft model, what is returned has them as `drafts`, for every chunk that awaited some.
        """
        ...

    def sample(self, forward: Forward, masks: Masks) -> Ticket:
        """Dispatch the sampling of the plan whose forward pass was dispatched last.

        Args:
            masks: of the plan's constrained rows; empty if it has none.
        """
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the plan's tokens."""
        ...

    def reset(self) -> None:
        """Forget all KV and every plan that was not collected, after a step has failed."""
        ...
