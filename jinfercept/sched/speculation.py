"""Speculative decoding: which sequences get drafts in a step, and how many.

A draft is verified in the ordinary step: the target draws the token of every position with that position's own random numbers,
and what it drew counts up to and including the first token that differs from its draft (`kept`). So drafts change neither the
distribution of tokens nor, for a request with a seed or without temperature, the tokens.

Drafts are what followed the sequence's last tokens before (`ngrams`), which is known when the plan is made; or what a draft
model writes, which the runner asks while it executes the plan; or what a layer of the model itself wrote in the step before,
which came with the tokens of that step (`propose`).

The KV of a draft counts once its token was drawn; the pages of the others are given back (`KVManager.trim`). The states of
recurrent layers have not seen any drafts, so that the accepted ones are computed again, in the step after.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple, final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.cost import StepBudget
from jinfercept.sched.draft_state import Acceptance, DraftState, NgramIndex
from jinfercept.sched.plan import FROM_DEVICE, FROM_DRAFT_MODEL, Chunk, DraftPlan
from jinfercept.sched.plan_builder import PlanBuilder, SchedulerCounters
from jinfercept.sched.sequence import Sequence

_NGRAM_CHANCE, _MODEL_CHANCE = 0.6, 0.9
"""Chance that a draft is accepted before any was tried: an n-gram's, and a draft model's."""
_LEAST_CHANCE = 0.1
"""Drafts that are accepted less often than this are never computed."""
_MOST_IDLE = 1.0
"""For how long the layer that drafts reads tokens though no draft would pay, in time of whole steps: after that it rests."""


class SpeculationLimits(NamedTuple):
    """Options of drafts.

    Attributes:
        num_drafts: most drafts of a sequence in a step; 0: there are none.
        shortest, longest: tokens of the n-grams that are looked up.
        pass_share: for drafts of a model the seconds of one of its steps, by those of the whole step for as many rows; None:
            drafts are n-grams.
        by_layer: the model is a layer of the served one.
        exposed_s: seconds that a step takes longer if the next one waits for its tokens, as drafts do.
    """

    num_drafts: int
    shortest: int
    longest: int
    pass_share: float | None = None
    by_layer: bool = False
    exposed_s: float = 0.0


NO_DRAFTS = SpeculationLimits(0, 1, 1)


def kept(drafts: tuple[int, ...], drawn: tuple[int, ...]) -> int:
    """How many drawn tokens count: those up to and including the first that differs from its draft.

    Args:
        drafts: of the positions in order.
        drawn: of the same positions, and of the one after them.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    return accepted + 1


def choose_depths(
    prospects: list[list[float]],
    num_sampled: int,
    query_tokens: int,
    most: int,
    step_s: Callable[[int], float],
    pass_s: Callable[[int], float] | None = None,
) -> list[int]:
    """The number of drafts of each sequence that makes the most expected tokens per second.

    A sequence's drafts are taken in order. Whatever the number of drafts in a step, the likeliest ones of all sequences are
    taken.

    Args:
        prospects: of every sequence, the chance of each of its drafts that it is accepted if those before it are.
        num_sampled: tokens that the step draws without drafts.
        query_tokens: of the step without drafts.
        most: drafts of all sequences together.
        step_s: seconds of a step by its query tokens.
        pass_s: seconds of a draft model's step by its rows; every sequence has one row for each of its drafts. None: drafts
            take no time.
    """
    depths, chosen = [0] * len(prospects), [0] * len(prospects)
    heap = [(-chances[0], place) for place, chances in enumerate(prospects) if chances]
    heap.sort()
    gain, best = 0.0, num_sampled / step_s(query_tokens)
    rows, passes_s = Counter[int](), 0.0  # of the draft model's steps
    for number in range(1, most + 1):
        if not heap or -heap[0][0] < _LEAST_CHANCE:
            break
        negative, place = heappop(heap)
        gain -= negative
        depths[place] += 1
        if pass_s is not None:
            rows[depths[place]] += 1
            number_of_rows = rows[depths[place]]
            passes_s += pass_s(number_of_rows) - (pass_s(number_of_rows - 1) if number_of_rows > 1 else 0.0)
        if depths[place] < len(chances := prospects[place]):
            heappush(heap, (negative * chances[depths[place]], place))
        rate = (num_sampled + gain) / (step_s(query_tokens + number) + passes_s)
        if rate > best:
            best, chosen = rate, depths.copy()
    return chosen


@final
class Speculation:
    """The drafts of one scheduler's plans.

    Args:
        limits: options.
        kv: pages for the drafts come from free slots and from finished prefixes, never from paused contexts.
        budget: prices a step.
        max_model_len: tokens that a sequence may have.
        counters: drafts are counted there.
    """

    def __init__(
        self,
        limits: SpeculationLimits,
        kv: KVManager,
        budget: StepBudget,
        max_model_len: int,
        counters: SchedulerCounters,
    ) -> None:
        self._limits, self._kv, self._budget = limits, kv, budget
        self._max_model_len, self._counters = max_model_len, counters
        self._most_known = 1 + limits.num_drafts if kv.has_states else 1  # tokens of a row before its drafts
        self._by_model, self._overall = limits.pass_share is not None, Acceptance(limits.num_drafts)
        self._again = 2 if kv.has_states else 1  # accepted drafts are computed again
        self._coming = False  # the last plan has drafts made
        self._idle = _MOST_IDLE  # steps' time for which the layer has read in vain

    def extend(self, builder: PlanBuilder) -> None:
        """Add drafts to the decode rows of a plan that is complete otherwise, as far as they are expected to pay.

        Beside chunks of prompts, drafts only fill the places of the bucket that would stay empty.
        """
        if self._limits.by_layer:
            self._plan_layer(builder)
        if builder.stalled:
            return
        decoding = [  # the last tokens of sequences, known to the host
            place
            for place, (_, chunk) in enumerate(builder.chunks)
            if chunk.sample is not None and len(chunk.tokens) <= self._most_known and chunk.tokens[-1] != FROM_DEVICE
        ]
        drafted = [(place, drafts) for place in decoding if (drafts := self._draft(builder.chunks[place][0]))]
        if not drafted:
            return
        used, most = builder.bucket_tokens - builder.query_tokens, builder.query_tokens
        if len(decoding) < len(builder.chunks):
            most = self._budget.bucket(used) - used
        sequences = [builder.chunks[place][0] for place, _ in drafted]
        depths = self._depths(
            sequences, [len(drafts) for _, drafts in drafted], len(decoding), used, most, builder.context_tokens
        )
        for (place, drafts), depth in zip(drafted, depths, strict=True):
            sequence, chunk = builder.chunks[place]
            first = chunk.start + len(chunk.tokens)
            if depth and not self._kv.takes_drafts(sequence.context, chunk.start):
                depth = 0
            depth = self._kv.place(sequence.context, first, first + depth, drafts=True) - first
            if depth:
                builder.chunks[place] = sequence, self._drafted(sequence, chunk, drafts[:depth])
                builder.query_tokens -= depth
                builder.drafted += depth
                if builder.draft is not None:
                    self._state(sequence).num_read += depth
            else:
                self._state(sequence).acceptance.forget()
        if not builder.drafted:
            self._overall.forget()
        self._counters.drafted += builder.drafted

    def _plan_layer(self, builder: PlanBuilder) -> None:
        """Have the layer that drafts write for the next plan, if that is expected to pay there.

        It rests where no draft has paid for a while. A sequence of which it has not read all tokens has no drafts any more, so
        that it goes on for one that begins.
        """
        sequences, counts, following = list[Sequence](), list[int](), dict[int, int]()
        for sequence, chunk in builder.chunks:
            end = chunk.start + len(chunk.tokens)
            if chunk.sample is None:
                following[chunk.slot] = sequence.tokens[end]
            has_all = self._state(sequence, chunk.start).num_read >= chunk.start
            if has_all and (count := self._room(sequence, max(end, len(sequence.tokens)) + 1)):
                sequences.append(sequence)
                counts.append(count)
        num_rows, most = len(sequences), (self._budget.buckets[-1] - len(sequences)) // self._again
        pays = bool(sequences) and any(
            self._depths(sequences, counts, num_rows, num_rows, most, builder.context_tokens, has_passes=True)
        )
        self._coming = pays and len(following) < len(builder.chunks)
        if builder.chunks:
            self._idle = 0.0 if pays else self._idle + (self._limits.pass_share or 0.0)
        if not pays:
            for sequence in sequences:
                self._state(sequence).acceptance.forget()
            self._overall.forget()
        reads = self._idle < _MOST_IDLE
        for sequence, chunk in builder.chunks:
            if (state := self._state(sequence)).num_read >= chunk.start:
                state.num_read = chunk.start + len(chunk.tokens) if reads else chunk.start
        builder.draft = DraftPlan(self._coming, following) if reads else None

    def propose(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Drafts of the tokens behind those that a sequence has now."""
        state, num_tokens = self._state(sequence), len(sequence.tokens)
        if state.num_read >= num_tokens - 1:
            state.proposed, state.num_tokens = drafts, num_tokens

    def waits(self, running: Iterable[Sequence]) -> bool:
        """Whether a plan should wait for the tokens of the step before: drafts that would pay continue the tokens known."""
        if self._limits.by_layer:
            return self._coming and any(sequence.pending for sequence in running)
        sequences, counts, num_decoding, context_tokens = list[Sequence](), list[int](), 0, 0
        for sequence in running:
            num_decoding += 1
            context_tokens += sequence.length
            if sequence.pending and (drafts := self._draft(sequence)):
                sequences.append(sequence)
                counts.append(len(drafts))
        if not sequences:
            return False
        most = self._budget.buckets[-1] - num_decoding
        return any(self._depths(sequences, counts, num_decoding, num_decoding, most, context_tokens))

    def settle(self, sequence: Sequence, num_drafts: int, accepted: int) -> None:
        """A step with drafts of a sequence has ended, and its tokens that count were accepted: give back what the others hold.

        Args:
            accepted: drafts that became tokens.
        """
        self._state(sequence).acceptance.note(num_drafts, accepted)
        self._overall.note(num_drafts, accepted)
        self._counters.drafts += 1
        self._counters.accepted.update(range(accepted))
        sequence.pending = 0
        if sequence.context.in_use:
            sequence.row.cut(self._kv.trim(sequence.context))

    def _state(self, sequence: Sequence, num_read: int = 0) -> DraftState:
        if sequence.drafting is None:
            ngrams = None if self._by_model else NgramIndex(self._limits.shortest, self._limits.longest)
            sequence.drafting = DraftState(ngrams, Acceptance(self._limits.num_drafts), num_read)
        return sequence.drafting

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        """Drafts that follow the known tokens of a sequence, within its limits; its next token is planned already."""
        if not (count := self._room(sequence, len(sequence.tokens))):
            return ()
        state = self._state(sequence)
        if self._limits.by_layer:
            return state.proposed[:count] if state.num_tokens == len(sequence.tokens) else ()
        ngrams = state.ngrams
        return (FROM_DRAFT_MODEL,) * count if ngrams is None else ngrams.draft(sequence.tokens, count)

    def _room(self, sequence: Sequence, num_tokens: int) -> int:
        """How many drafts a sequence may have behind so many tokens."""
        if not sequence.may_draft:
            return 0
        to_generate = sequence.max_tokens - sequence.generated - (num_tokens - len(sequence.tokens))
        return max(0, min(self._limits.num_drafts, min(to_generate, self._max_model_len - num_tokens) - 1))

    def _depths(
        self,
        sequences: list[Sequence],
        counts: list[int],
        num_sampled: int,
        query_tokens: int,
        most: int,
        context_tokens: int,
        *,
        has_passes: bool = False,
    ) -> list[int]:
        before = [_MODEL_CHANCE if self._by_model else _NGRAM_CHANCE] * self._limits.num_drafts
        if self._by_model:
            before = self._overall.chances(before)
        prospects = [
            self._state(sequence).acceptance.chances(before)[:count]
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        cost, bucket = self._budget.cost, self._budget.bucket

        def pass_s(rows: int) -> float:
            return (self._limits.pass_share or 0.0) * cost.step_s(bucket(rows), context_tokens)

        # the layer makes all its drafts, whatever becomes of them
        beside_s = self._limits.exposed_s + (self._limits.num_drafts * pass_s(num_sampled) if has_passes else 0.0)

        def step_s(tokens: int) -> float:
            computed = min(query_tokens + self._again * (tokens - query_tokens), self._budget.buckets[-1])
            return cost.step_s(bucket(computed), context_tokens) + (beside_s if tokens > query_tokens else 0.0)

        has_model = self._by_model and not self._limits.by_layer
        return choose_depths(prospects, num_sampled, query_tokens, most, step_s, pass_s if has_model else None)

    def _drafted(self, sequence: Sequence, chunk: Chunk, drafts: tuple[int, ...]) -> Chunk:
        """A decode row with drafts."""
        sequence.pending += len(drafts)
        num_pages = (chunk.start + len(chunk.tokens) + len(drafts) - 1) // self._kv.page_size + 1
        new_pages = sequence.row.new_pages(sequence.context, num_pages)
        if chunk.new_pages and new_pages:
            new_pages = chunk.new_pages.joined(new_pages)
        return chunk._replace(
            tokens=(*chunk.tokens, *drafts), new_pages=new_pages or chunk.new_pages, num_drafts=len(drafts)
        )
