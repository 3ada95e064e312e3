"""A complete, printable description of one iteration. Made by the scheduler, executed by a runner, priced by a simulator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinfercept.kv.store import PageCopy
from jinfercept.sched.sampling_options import DrawOptions, TokenHistory

FROM_DEVICE = -1
"""A chunk's token that only the device knows: the last one sampled in the chunk's sequence slot."""

Masks = Callable[[], Mapping[int, Any]]
"""What some of a plan's sampled rows may draw, by the row's number among them: an array of 32-bit words, in which bit `v % 32`
of word `v // 32` allows token `v`. Called by the runner once the plan's compute was dispatched; not if nothing is sampled."""


class Sample(NamedTuple):
    """How a chunk's next token is drawn.

    Attributes:
        position: the new token's place in the sequence (the seed's counter).
        options: what else the request asks for.
        held: it may not end yet.
        history: what the device has to remember of the sequence, if that has a new slot.
    """

    temperature: float
    seed: int
    position: int
    options: DrawOptions | None = None
    held: bool = False
    history: TokenHistory | None = None


class Score(NamedTuple):
    """Which tokens of a prompt are to be scored by a chunk's logits.

    Attributes:
        first: the first of the chunk's tokens whose successor is.
        targets: that successor, and those of the tokens after it.
        num_best: likeliest tokens to report beside each.
    """

    first: int
    targets: tuple[int, ...]
    num_best: int


class Chunk(NamedTuple):
    """Consecutive query tokens of one sequence. Decoding is a chunk of one.

    Attributes:
        slot: the sequence's slot in the runner's page tables.
        start: position of the first token.
        tokens: token ids, or `(FROM_DEVICE,)`.
        new_pages: (index in the page table, device slot) pairs that the runner does not know yet.
        sample: draw the next token from the last one's logits, or None.
        score: report log probabilities of tokens that are known already.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    new_pages: tuple[tuple[int, int], ...]
    sample: Sample | None
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, executed as: fetch, drop, copy-out, compute, sample, land.

    Attributes:
        number: counts the plans of one scheduler.
        bucket: query tokens of the executable that runs it; 0 if nothing is computed.
        chunks: what is computed, chunks of one token first.
        offload: pages copied to the host, as they were before this plan's compute.
        fetch: pages brought to landing buffers.
        land: landing buffers written to their device slots after the compute: readable from the next plan on.
        drop: host slots whose arrays are to be forgotten.
    """

    number: int
    bucket: int
    chunks: tuple[Chunk, ...] = ()
    offload: tuple[PageCopy, ...] = ()
    fetch: tuple[PageCopy, ...] = ()
    scatter: tuple[PageCopy, ...] = ()
    drop: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens, without padding."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.offload or self.fetch or self.scatter or self.drop)


class TokenLogprobs(NamedTuple):
    """Log probability and rank (1: none is likelier) of a token, and the likeliest tokens in its place with theirs."""

    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """What came of a plan.

    Attributes:
        tokens: one per sampled chunk, in the plan's order.
        elapsed_s: seconds that it took.
        logprobs: one per sampled chunk, None where nobody asked; empty if nobody did at all.
        scores: for each chunk with a score, in the plan's order, its targets'.
    """

    tokens: tuple[int, ...]
    elapsed_s: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
