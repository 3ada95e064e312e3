"""A complete, printable description of one iteration. Made by the scheduler, executed by a runner, priced by a simulator."""

from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.kv.store import PageCopy

FROM_DEVICE = -1
"""A chunk's token that only the device knows: the last one sampled in the chunk's sequence slot."""


class Sample(NamedTuple):
    """How a chunk's next token is drawn; `position` is the new token's place in the sequence (the seed's counter)."""

    temperature: float
    seed: int
    position: int


class Chunk(NamedTuple):
    """Consecutive query tokens of one sequence. Decoding is a chunk of one.

    Attributes:
        slot: the sequence's slot in the runner's page tables.
        start: position of the first token.
        tokens: token ids, or `(FROM_DEVICE,)`.
        new_pages: (index in the page table, device slot) pairs that the runner does not know yet.
        sample: draw the next token from the last one's logits, or None.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    new_pages: tuple[tuple[int, int], ...]
    sample: Sample | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, executed as: fetch, drop, copy-out, compute, sample, land.

    Attributes:
        number: counts the plans of one scheduler.
        bucket: query tokens of the executable that runs it; 0 if nothing is computed.
        chunks: what is computed, chunks of one token first.
        copy_out: pages copied to the host, as they were before this plan's compute.
        fetch: pages brought to landing buffers.
        land: landing buffers written to their device slots after the compute: readable from the next plan on.
        drop: host slots whose arrays are to be forgotten.
    """

    number: int
    bucket: int
    chunks: tuple[Chunk, ...] = ()
    copy_out: tuple[PageCopy, ...] = ()
    fetch: tuple[PageCopy, ...] = ()
    land: tuple[PageCopy, ...] = ()
    drop: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens, without padding."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.copy_out or self.fetch or self.land or self.drop)


class StepResult(NamedTuple):
    """What came of a plan: one token per sampled chunk, in the plan's order, and the seconds it took."""

    tokens: tuple[int, ...]
    elapsed_s: float
