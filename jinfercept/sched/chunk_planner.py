"""Plans the next step of one running sequence: its fetches, and its next token or chunk. Chooses no sequence."""

from jinfercept.kv.manager import KVManager
from jinfercept.sched.plan import FROM_DEVICE, Chunk
from jinfercept.sched.plan_builder import PlanBuilder, SchedulerCounters
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.transfers import Transfers


class ChunkPlanner:
    """Adds chunks, of at most `chunk_tokens` query tokens each, and fetches of running sequences to a plan."""

    def __init__(
        self,
        kv: KVManager,
        queues: Queues,
        transfers: Transfers,
        counters: SchedulerCounters,
        *,
        max_model_len: int,
        chunk_tokens: int,
    ) -> None:
        self._kv, self._running = kv, queues.running
        self._transfers, self._counters = transfers, counters
        self._max_model_len, self._chunk_tokens = max_model_len, chunk_tokens

    def decode(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Plan the next token of a sequence that has all it needs, and return True. The fast path of `run`."""
        context, num_tokens = sequence.context, len(sequence.tokens)
        start = num_tokens + sequence.pending - 1
        if (
            context.ready != start
            or sequence.max_computed > start
            or start + 1 >= self._max_model_len
            or sequence.generated + sequence.pending >= sequence.max_tokens
            or not self._kv.append(context, sequence.row.num_pages)
        ):
            return False
        tokens = (sequence.tokens[start],) if start < num_tokens else (FROM_DEVICE,)
        sample = sequence.draw()
        slot = sequence.row.slot
        assert slot is not None
        builder.chunks.append((sequence, Chunk(slot, start, tokens, (), sample, None, 0, sequence.adapter)))
        builder.query_tokens -= 1
        self._counters.computed += 1
        sequence.max_computed = start + 1
        sequence.planned = True
        sequence.pending += 1
        return True

    def run(self, builder: PlanBuilder, sequence: Sequence, most: int) -> None:
        """Plan the sequence's fetches and its next chunk of at most `most` query tokens, as slots, bucket and link allow."""
        kv, context, length = self._kv, sequence.context, sequence.length
        if context.ready < length - 1:
            kv.advance(context)
            self._fetch(builder, sequence)
        if sequence.generated + sequence.pending >= sequence.max_tokens or length >= self._max_model_len:
            return
        # a recurrent state that has seen the last token cannot give the logits behind it again
        if context.ready >= length and kv.has_seen(context, length):
            self._restart(sequence)
        start = min(context.ready, length - 1)
        is_last = start == length - 1 and kv.is_there(context)
        end = length if is_last else kv.gap_end(context, length)
        end = min(end, start + min(most, self._chunk_tokens))
        if start >= end:
            return
        if kv.side_pool:
            end = kv.side_pool.chunk_end(context, start, end, length)
        placed = kv.place(context, start, end)
        while placed < end and self._transfers.free_slot(builder, sequence, kv.pages_between(placed, end), placed):
            placed = kv.place(context, placed, end)
        if start < placed:
            self._add_chunk(builder, sequence, start, placed)

    def _add_chunk(self, builder: PlanBuilder, sequence: Sequence, start: int, end: int) -> None:
        row, num_pages = sequence.row, (end - 1) // self._kv.page_size + 1
        assert row.slot is not None
        num_tokens = len(sequence.tokens)
        assert end <= num_tokens or start == num_tokens, "a sample in flight is a chunk of its own"
        tokens = tuple(sequence.tokens[start:end]) if end <= num_tokens else (FROM_DEVICE,)
        sample = sequence.draw() if end == sequence.length else None
        score = None if sequence.num_best is None else sequence.score(start, end)
        pages, adapter = row.new_pages(sequence.context, num_pages), sequence.adapter
        chunk = Chunk(row.slot, start, tokens, pages, sample, score, adapter=adapter)
        self._kv.computed(sequence.context, start, end)
        self._kv.commit(sequence.context, sequence.tokens)
        if self._kv.side_pool and (end - start > 1 or end < num_tokens):
            self._kv.side_pool.mark(sequence.context)
        recomputed = max(0, min(end, sequence.max_computed) - start)
        sequence.max_computed = max(sequence.max_computed, end)
        if recomputed:
            self._counters.recompute(sequence, recomputed)
            builder.recomputed += recomputed
            builder.recomputing.append(sequence)
        sequence.planned = True
        sequence.pending += sample is not None
        self._counters.computed += end - start
        builder.chunks.append((sequence, chunk))
        builder.query_tokens -= end - start

    def _restart(self, sequence: Sequence) -> None:
        kv, context = self._kv, sequence.context
        kv.release(context)
        kv.step_back(context, sequence.length)
        kv.hold(context)
        sequence.row.cut(context.ready // kv.page_size)

    def fetch_more(self, builder: PlanBuilder) -> None:
        # `run` counts on the link time beside a step that only decodes; a step with chunks lasts longer
        if len(builder.chunks) == len(self._running):
            return
        for sequence in list(self._running):
            if builder.stalled or not self._transfers.room(builder):
                return
            if not sequence.planned and sequence.state is State.RUNNING:
                self._fetch(builder, sequence)

    def _fetch(self, builder: PlanBuilder, sequence: Sequence) -> None:
        transfers = self._transfers
        num_fetchable = self._kv.num_fetchable(sequence.context) if transfers.room(builder) else 0
        while (
            num_fetchable
            and (room := transfers.room(builder))
            and self._transfers.free_slot(builder, sequence, min(num_fetchable, room), sequence.context.ready)
        ):
            fetched = transfers.fetch(builder, sequence, num_fetchable)
            if not fetched:  # its window has to wait
                return
            num_fetchable -= fetched
