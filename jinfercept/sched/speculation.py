"""Speculative decoding: which sequences get drafts in a step, and how many.

An ordinary step verifies drafts. The target model draws the token of every position with that position's own random numbers,
and the drawn tokens count up to and including the first that differs from its draft (`kept`). So drafts do not change the
distribution of tokens, nor the tokens of a request with a seed or without temperature.

Drafts come from one of three sources: earlier occurrences of the last tokens (`ngrams`), known when the plan is made; a draft
model, which the runner calls while it executes the plan; or a layer of the model itself, whose drafts came with the tokens of
the step before (`propose`).
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median_low
from typing import NamedTuple, final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.plan import FROM_DEVICE, FROM_DRAFT_MODEL, Chunk, DraftPlan
from jinfercept.sched.plan_builder import PlanBuilder, PlannedStep, SchedulerCounters
from jinfercept.sched.profile import StepBudget
from jinfercept.sched.sequence import Sequence

_MOST_CANDIDATES = 16
"""Earlier occurrences of the shortest n-gram that are compared, the latest first."""


@final
class NgramIndex:
    """The n-grams of one growing list of tokens: prompt, generated tokens and results of calls alike.

    Memory is one entry per token. The time of a draft does not grow with the list.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self._shortest, self._longest = shortest, longest
        self._latest: dict[tuple[int, ...], int] = {}  # where an n-gram of the shortest length ended last
        self._before: dict[int, int] = {}  # where the one that ends here ended before
        self._end = shortest  # of the n-gram that is entered next

    def draft(self, tokens: "list[int] | array[int]", count: int) -> tuple[int, ...]:
        """At most `count` tokens that followed the last occurrence of the longest n-gram with which `tokens` ends."""
        if count < 1 or len(tokens) <= self._shortest:
            return ()
        # the list is that of the last call, with new tokens behind
        for end in range(self._end, len(tokens)):
            ngram = tuple(tokens[end - self._shortest : end])
            if (previous := self._latest.get(ngram)) is not None:
                self._before[end] = previous
            self._latest[ngram] = end
        self._end = max(self._end, len(tokens))
        best, best_at = self._shortest - 1, None
        at = self._latest.get(tuple(tokens[len(tokens) - self._shortest :]))
        for _ in range(_MOST_CANDIDATES):
            if at is None or best == self._longest:
                break
            if (length := self._common(tokens, at)) > best:
                best, best_at = length, at
            at = self._before.get(at)
        if best_at is None:
            return ()
        # a continuation that reaches the end of the list goes on with itself, so that a repetition is drafted as one
        period = len(tokens) - best_at
        return tuple([tokens[best_at + index % period] for index in range(count)])

    def _common(self, tokens: "list[int] | array[int]", end: int) -> int:
        length = self._shortest
        while length < min(self._longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


_PRIOR = 2.0
"""Number of drafts that the expected chance weighs, which is assumed before any draft was tried."""
_KEPT = 0.9
"""Weight of earlier results against those of a draft that is tried."""
_KEPT_UNTRIED = 0.995
"""The same in a step that found a draft and did not try it. Where all drafts are refused, one is tried in about 30 steps,
which costs less than 2 % of the time."""


class Acceptance:
    """How many drafts were accepted lately, by their place among the drafts of a step."""

    __slots__ = ("_tried", "accepted")

    def __init__(self, num_places: int) -> None:
        # by place; older drafts count less
        self._tried, self.accepted = [0.0] * num_places, [0.0] * num_places

    def chances(self, before: list[float]) -> list[float]:
        """For each place, the chance that its draft is accepted if those before it are; `before`: the same before any was
        tried."""
        places = zip(self.accepted, self._tried, before, strict=True)
        return [(accepted + _PRIOR * chance) / (tried + _PRIOR) for accepted, tried, chance in places]

    def note(self, num_drafts: int, accepted: int) -> None:
        """Count the drafts of a step. Those behind the first refused one say nothing."""
        for place in range(min(num_drafts, accepted + 1)):
            self._tried[place] = _KEPT * self._tried[place] + 1
            self.accepted[place] = _KEPT * self.accepted[place] + (place < accepted)
        self.forget(num_drafts)

    def forget(self, start: int = 0) -> None:
        """Age the counts from place `start` on: a step found drafts there and did not try them."""
        for seen in (self._tried, self.accepted):
            seen[start:] = [_KEPT_UNTRIED * number for number in seen[start:]]


@dataclass(slots=True)
class DraftState:
    """The sources and the acceptance of one sequence's drafts, owned by `Speculation`."""

    ngrams: NgramIndex | None  # of its tokens; None where a model drafts
    acceptance: Acceptance
    num_read: int  # leading tokens that the drafting layer has read without a gap
    proposed: tuple[int, ...] = ()  # drafts of that layer behind the first `num_tokens` tokens
    num_tokens: int = 0


_NGRAM_CHANCE, _MODEL_CHANCE = 0.6, 0.9
"""Chance that a draft is accepted before any was tried: an n-gram's, and a draft model's."""
_LEAST_CHANCE = 0.1
"""Drafts that are accepted less often than this are never computed."""
_FREE_CREDIT, _INCOME, _MOST_SAVED = 1.0, 0.01, 4.0
"""The drafting layer's account, in times of a step without drafts: its first balance, its income in each step while it has
less than that, and the most that it can save."""
_FEWEST_TIMES, _MOST_TIMES = 3, 9
"""Steps of each kind, with and without drafts, whose times are compared: at least, and at most."""
_TRUSTED = 0.5
"""Once this many first drafts of the layer were right, the latest counting most, steps verify its drafts."""
_REFRESHED = 256
"""One step in this many goes without drafts of the layer, and one in this many without drafts forgets the oldest time of a
step with drafts."""
_SAMPLED = 32
"""One step in this many is timed where no draft is in sight."""


class SpeculationLimits(NamedTuple):
    """Options of drafts."""

    num_drafts: int  # of a sequence in a step at most; 0: there are none
    shortest: int  # tokens of the n-grams that are looked up, with `longest`
    longest: int
    # seconds of a draft model's step over those of the whole step for as many rows; None: drafts are n-grams
    pass_share: float | None = None
    by_layer: bool = False  # the model is a layer of the served one or its assistant, and drafts behind a step's draws
    has_own_kv: bool = True  # this layer drafts for a sequence only if it has read all its tokens


NO_DRAFTS = SpeculationLimits(0, 1, 1)


def kept(drafts: tuple[int, ...], drawn: tuple[int, ...]) -> int:
    """How many drawn tokens count: those up to and including the first that differs from its draft."""
    # `drawn` has one more token than `drafts`, of the position after the last
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

    A sequence's drafts are taken in order. For any number of drafts in a step, the likeliest ones of all sequences are taken.

    Args:
        prospects: for every sequence and each of its drafts, the chance that it is accepted if those before it are.
        num_sampled, query_tokens: tokens that the step without drafts draws and computes.
        most: drafts of all sequences together.
        step_s: seconds of a step by its query tokens.
        pass_s: seconds of a draft model's step by its rows, one for each draft of a sequence; None: drafts take no time.
    """
    depths, chosen = [0] * len(prospects), [0] * len(prospects)
    likely = sorted((-chance, place) for place, chances in enumerate(prospects) for chance in accumulate(chances, mul))
    gain, best = 0.0, num_sampled / step_s(query_tokens)
    rows, passes_s = Counter[int](), 0.0  # of the draft model's steps
    for number, (negative, place) in enumerate(likely[:most], start=1):
        if -negative < _LEAST_CHANCE:
            break
        gain -= negative
        depths[place] += 1
        if pass_s is not None:
            rows[depths[place]] += 1
            number_of_rows = rows[depths[place]]
            passes_s += pass_s(number_of_rows) - (pass_s(number_of_rows - 1) if number_of_rows > 1 else 0.0)
        rate = (num_sampled + gain) / (step_s(query_tokens + number) + passes_s)
        if rate > best:
            best, chosen = rate, depths.copy()
    return chosen


@final
class Speculation:
    """The drafts of one scheduler's plans.

    The profile prices a step with drafts. Other costs, such as the wait for the tokens before the next plan, are measured
    while the engine decodes (`note_step`). A layer that drafts also has an account of the time that it saved and lost: it
    writes drafts only while there is credit.
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
        # the states of recurrent layers have seen no drafts
        self._again = 2 if kv.has_states else 1  # accepted drafts are computed again
        self._coming = self._reads = False  # the last plan has drafts made; the layer reads its tokens
        self._credit = _FREE_CREDIT
        # seconds of steps by those of the profile, without drafts and with, and how much higher they are with drafts
        self._times = deque[float](maxlen=_MOST_TIMES), deque[float](maxlen=_MOST_TIMES)
        self._slower, self._accepted, self._num_rows, self._noted_s = 1.0, 0, 0, 0.0

    def extend(self, builder: PlanBuilder) -> None:
        """Add drafts to the decode rows of a plan that is otherwise complete, as far as they are expected to pay."""
        if self._limits.by_layer:
            has_drafts = self._coming
            self._plan_layer(builder)
            if not has_drafts:
                return
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
        # beside chunks of prompts, drafts only fill the places of the bucket that would stay empty
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
            # these pages come from free slots and from finished prefixes, never from paused contexts
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

        Until some drafts were right, a few are only compared with the draws of the following steps, which wait for nothing.
        Where no draft pays, the layer reads on while there is credit, and then rests. A sequence of which it has not read all
        tokens gets no more drafts, so that it goes on for one that begins.
        """
        verifies, has_credit, writes, self._coming = self._coming, self._credit > 0, False, False
        readers = [entry for entry in builder.chunks if self._has_read(*entry)]
        if not readers:
            self._reads = False
            self._overall.forget()
            return
        sequences, counts = list[Sequence](), list[int]()
        for sequence, chunk in readers:
            state = self._state(sequence)
            if state.proposed:
                drawn = tuple(sequence.tokens[state.num_tokens : state.num_tokens + len(state.proposed)])
                right = kept(state.proposed[: len(drawn)], drawn) - 1
                if right < len(drawn) or right == len(state.proposed):
                    for acceptance in (state.acceptance, self._overall):
                        acceptance.note(len(state.proposed), right)
                    state.proposed = ()
            if count := self._room(sequence, max(chunk.start + len(chunk.tokens), len(sequence.tokens)) + 1):
                sequences.append(sequence)
                counts.append(count)
        num_rows, most = len(sequences), (self._budget.buckets[-1] - len(sequences)) // self._again
        pays = any(self._depths(sequences, counts, num_rows, num_rows, most, builder.context_tokens, has_passes=True))
        if not pays:
            self._overall.forget()
            self._credit = min(self._credit, _FREE_CREDIT)
        elif has_credit and any(chunk.sample for _, chunk in builder.chunks):
            is_timed = len(self._times[0]) >= _FEWEST_TIMES and self._counters.plans % _REFRESHED > 0
            self._coming = self._overall.accepted[0] > _TRUSTED and is_timed
            is_compared = any(self._state(sequence).proposed for sequence in sequences)
            writes = self._coming or (self._counters.plans % 2 == 0 and not is_compared)
        self._reads = verifies or (has_credit and (pays or self._reads))
        for sequence, chunk in readers:
            self._state(sequence).num_read = chunk.start + len(chunk.tokens) * self._reads
        if self._reads:
            following = {
                chunk.slot: sequence.tokens[chunk.start + len(chunk.tokens)]
                for sequence, chunk in builder.chunks
                if chunk.sample is None
            }
            builder.draft = DraftPlan(writes, following)

    def propose(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Store drafts of the tokens behind a sequence's last one."""
        state, num_tokens = self._state(sequence), len(sequence.tokens)
        if state.num_read >= num_tokens - 1 or not self._limits.has_own_kv:
            state.proposed, state.num_tokens = drafts[: self._limits.num_drafts], num_tokens

    def waits(self, running: Iterable[Sequence]) -> bool:
        """Whether a plan should wait for the tokens of the step before: drafts that would pay continue the known tokens."""
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
        """Count the accepted drafts of a sequence after a step, and give back the pages of the others."""
        self._state(sequence).acceptance.note(num_drafts, accepted)
        self._overall.note(num_drafts, accepted)
        self._accepted += accepted
        self._counters.drafts += 1
        self._counters.accepted.update(range(accepted))
        sequence.pending = 0
        if sequence.context.in_use:
            sequence.row.cut(self._kv.trim(sequence.context))

    def note_step(self, planned: PlannedStep, now: float) -> None:
        """Learn how long steps with drafts last, after a step whose tokens are settled, and enter it in the account."""
        plan, rests = planned.plan, planned.plan.draft is None and not planned.has_drafts
        accepted, last_s, last_rows, num_rows = self._accepted, self._noted_s, self._num_rows, len(plan.chunks)
        self._accepted, self._noted_s, self._num_rows = 0, now, num_rows
        self._credit += _INCOME if self._credit < _FREE_CREDIT else 0.0
        # steps count that follow another one and in which, as in that one, the same number of rows decode and nothing else
        if num_rows != last_rows or not num_rows or (rests and plan.number % _SAMPLED):
            return
        if plan.num_tokens > num_rows * (self._most_known + self._limits.num_drafts):
            return
        without, with_drafts = self._times
        cost, makes = self._budget.cost, plan.draft is not None and plan.draft.drafts
        reads = plan.draft is not None and self._limits.has_own_kv
        passes = self._limits.num_drafts if makes else 0.5 * reads  # to read takes no head and no draw
        plain_s = cost.plan_s(plan)
        priced_s = plain_s * (1 + passes * (self._limits.pass_share or 0.0))
        if planned.has_drafts or not makes:
            self._times[planned.has_drafts].append((now - last_s) / priced_s)
        if rests:
            if with_drafts and plan.number % _REFRESHED == 0:
                with_drafts.popleft()
            return
        is_known = min(len(with_drafts), len(without)) >= _FEWEST_TIMES
        self._slower = median_low(with_drafts) / median_low(without) if is_known else 1.0
        if planned.has_drafts:
            context_tokens = sum([chunk.start + 1 for chunk in plan.chunks])
            plain_s = cost.step_s(self._budget.bucket(num_rows), context_tokens)
        if planned.has_drafts or makes:
            priced_s *= self._slower
        self._credit = min(self._credit + 1 + accepted / num_rows - priced_s / plain_s, _MOST_SAVED)

    def _state(self, sequence: Sequence, num_read: int = 0) -> DraftState:
        if sequence.drafting is None:
            ngrams = None if self._by_model else NgramIndex(self._limits.shortest, self._limits.longest)
            sequence.drafting = DraftState(ngrams, Acceptance(self._limits.num_drafts), num_read)
        return sequence.drafting

    def _has_read(self, sequence: Sequence, chunk: Chunk) -> bool:
        """Whether what drafts behind draws can draft behind a chunk's."""
        return self._state(sequence, chunk.start).num_read >= chunk.start or not self._limits.has_own_kv

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        if not (count := self._room(sequence, len(sequence.tokens))):
            return ()
        state = self._state(sequence)
        if self._limits.by_layer:
            proposed, state.proposed = state.proposed[:count], ()
            return proposed if state.num_tokens == len(sequence.tokens) else ()
        ngrams = state.ngrams
        return (FROM_DRAFT_MODEL,) * count if ngrams is None else ngrams.draft(sequence.tokens, count)

    def _room(self, sequence: Sequence, num_tokens: int) -> int:
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
        beside_s = self._limits.num_drafts * pass_s(num_sampled) if has_passes else 0.0

        def step_s(tokens: int) -> float:
            computed = min(query_tokens + self._again * (tokens - query_tokens), self._budget.buckets[-1])
            seconds = cost.step_s(bucket(computed), context_tokens)
            return self._slower * (seconds + beside_s) if tokens > query_tokens else seconds

        has_model = self._by_model and not self._limits.by_layer
        return choose_depths(prospects, num_sampled, query_tokens, most, step_s, pass_s if has_model else None)

    def _drafted(self, sequence: Sequence, chunk: Chunk, drafts: tuple[int, ...]) -> Chunk:
        sequence.pending += len(drafts)
        num_pages = (chunk.start + len(chunk.tokens) + len(drafts) - 1) // self._kv.page_size + 1
        new_pages = sequence.row.new_pages(sequence.context, num_pages)
        if chunk.new_pages and new_pages:
            new_pages = chunk.new_pages.joined(new_pages)
        return chunk._replace(
            tokens=(*chunk.tokens, *drafts), new_pages=new_pages or chunk.new_pages, num_drafts=len(drafts)
        )
