"""Drafts of a smaller model: it computes every plan too, on pages of its own with the numbers of the served model's.

So its KV of a token is wherever the served model's is: on the device, on the host, or nowhere. It drafts as it would generate,
with the temperature and the random numbers of the request's own draws: where the two models agree about the likeliest tokens
they also draw the same one (the Gumbel-max coupling).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from jaxtyping import Array, Int

from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import FROM_DEVICE, Chunk, Sample, StepPlan


@final
class ModelDrafter:
    """Makes the drafts that plans await.

    Args:
        shape: its sizes; pages, sequence slots and buckets as the served model's.
        vocab_size: tokens that the draft model knows, from 0 on.
    """

    def __init__(self, runner: ModelRunner, shape: RunnerShape, vocab_size: int) -> None:
        self.runner, self._buckets = runner, shape.buckets
        self._unknown = vocab_size if vocab_size < shape.drafts_for else None  # the first token that it does not know

    def fill(self, plan: StepPlan, last_tokens: Int[Array, "slots"]) -> tuple[StepPlan, tuple[tuple[int, ...], ...]]:
        """Execute a plan on the draft model, transfers and chunks, and make the drafts that it awaits.

        One step of the draft model has the plan's chunks, without the drafts that they await. Each step after it has a token
        drafted by the one before, the last one too, whose KV the next plan may need. Waits for the drafts, if there are any to
        make.

        Args:
            last_tokens: of the served model, see `ModelRunner.forward`.

        Returns:
            The plan with its drafts, and the drafts of every chunk that awaited them.
        """
        chunks = sorted(map(self._first, plan.chunks), key=lambda chunk: len(chunk.tokens) > 1)
        first = replace(plan, bucket=self._bucket(chunks), chunks=tuple(chunks))
        tickets = [self.runner.sample(self.runner.forward(first, last_tokens), {})]
        awaiting = [chunk for chunk in plan.chunks if chunk.awaits_drafts]
        if not awaiting:
            return plan, ()
        for place in range(1, 1 + max(chunk.num_drafts for chunk in awaiting)):
            rows = tuple(  # whose tokens are the drafts at this place
                Chunk(chunk.slot, chunk.start + len(chunk.known) - 1 + place, (FROM_DEVICE,), (), _draw(chunk, place))
                for chunk in awaiting
                if chunk.num_drafts >= place
            )
            tickets.append(self.runner.submit(StepPlan(plan.number, self._bucket(rows), rows)))
        drawn = [iter(self.runner.collect(ticket).tokens) for ticket in tickets]
        drafts = tuple(
            tuple(max(0, next(tokens)) for tokens in drawn[: chunk.num_drafts])  # 0 where none could be drawn
            for chunk in awaiting
        )
        iterator = iter(drafts)
        filled = [
            chunk._replace(tokens=(*chunk.known, *next(iterator))) if chunk.awaits_drafts else chunk
            for chunk in plan.chunks
        ]
        return replace(plan, chunks=tuple(filled)), drafts

    def _first(self, chunk: Chunk) -> Chunk:
        """The part of a chunk that the first step has."""
        tokens = chunk.known if chunk.awaits_drafts else chunk.tokens
        if self._unknown is not None and max(tokens) >= self._unknown:
            tokens = tuple(min(token, self._unknown - 1) for token in tokens)
        return chunk._replace(tokens=tokens, sample=_draw(chunk, 0), score=None, num_drafts=0)

    def _bucket(self, chunks: Sequence[Chunk]) -> int:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        return next(size for size in self._buckets if size >= num_tokens) if num_tokens else 0


def _draw(chunk: Chunk, place: int) -> Sample | None:
    """How the draft after a place is drawn; None behind the last, and where none is awaited."""
    if chunk.sample is None or not chunk.awaits_drafts or place == chunk.num_drafts:
        return None
    return Sample(chunk.sample.temperature, chunk.sample.random_key)
