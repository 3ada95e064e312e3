"""Contexts on disk: pages that waiting sequences lack are read before they start, and paused contexts are written behind.

Pages are read into the host's memory where that takes less time than to recompute them. Full pages of paused contexts are
written as soon as the host has copies of them, so a disk never takes time of the device's link or of a step.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final

from jinfercept.kv.context import Context
from jinfercept.kv.page import Residency
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import Sequence as RequestSequence
from jinfercept.sched.sequence import State
from jinfercept.sched.waste import return_s

_LOOKS = 16
"""Paused contexts that a step looks at to write them."""
_MOST_WRITES = 2
_WRITTEN_PIECES = 4
"""Pieces of one write."""
MOST_READ_AHEAD = 2
"""Most waiting sequences of a tenant whose pages are being read, or have been read and wait for their sequence to start."""
CLOSE_S = 20.0
"""Seconds that the end of an engine waits for what is still to be written."""


class PageDisk(Protocol):
    """Reads and writes pages in the background; `runner.disk_pages.DiskPages` says what its methods do. No method waits."""

    @property
    def piece_pages(self) -> int: ...
    @property
    def num_writes(self) -> int: ...
    def num_stored(self, root: bytes, tokens: Sequence[int], most: int) -> int: ...
    def read(
        self, key: int, root: bytes, tokens: Sequence[int], first: int, num_pages: int, num_side_slots: int
    ) -> None: ...
    def cancel(self, key: int) -> None: ...
    def poll_read(self) -> Sequence[Any]: ...
    def place(
        self,
        piece: Any,
        slots: Sequence[int | None],
        dropped: Sequence[int],
        side_slots: Sequence[int],
        dropped_sides: Sequence[int],
    ) -> None: ...
    def write(
        self,
        key: Context,
        root: bytes,
        tokens: Sequence[int],
        first: int,
        slots: Sequence[int],
        side_slots: Sequence[int] = (),
    ) -> None: ...
    def poll_stored(self) -> list[tuple[Context, int]]: ...
    def next_s(self) -> float | None: ...
    def close(self, longest_s: float) -> None: ...


class _Read(NamedTuple):
    sequence: RequestSequence
    # Shares the sequence's pages that are in a memory, up to the first that is read, and those that have arrived.
    context: Context
    end: int  # index behind the last page that is read


@final
class DiskContexts:
    """The contexts of one scheduler that are on disk. Used by the engine's thread.

    Args:
        price: seconds of recomputing, reading and fetching pages.
        chunk_tokens: query tokens of a step that recomputes.
    """

    def __init__(self, scheduler: Scheduler, disk: PageDisk, price: Profile, chunk_tokens: int) -> None:
        self._scheduler, self._kv, self._disk = scheduler, scheduler.kv, disk
        self._price, self._chunk_tokens = price, chunk_tokens
        self._reads: dict[int, _Read] = {}
        self._ready: dict[
            RequestSequence, Context
        ] = {}  # what was read of those that wait to start: others take none of it
        self._next_key = 0
        self._looked_at: set[RequestSequence] = set()  # of the waiting ones
        self._busy: set[Context] = set()  # paused contexts that are being counted or written
        # Paused contexts whose stored pages are counted; with each the pages up to which it was tried to write it, and those
        # before the last checkpoint that was.
        self._tried: dict[Context, tuple[int, int]] = {}
        self._round: list[RequestSequence] = []
        self._num_idle = 0  # contexts since the last one of which something was written
        self.read_tokens = 0  # instead of recomputed

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of waiting sequences whose pages are being read."""
        return len(self._reads)

    def read_ahead(self, now: float) -> None:
        """Give the host the pages that were read, and begin to read pages that the first waiting sequences lack."""
        for key, read in list(self._reads.items()):
            if read.sequence.state is not State.WAITING:
                self._end(key)
        for piece in self._disk.poll_read():
            if (read := self._reads.get(piece.key)) is not None:
                self._arrive(piece, read, now)
        waiting = self._scheduler.waiting
        for sequence in [looked_at for looked_at in self._looked_at if looked_at.state is not State.WAITING]:
            sequence.reads_disk = False
            self._looked_at.discard(sequence)
        if len(self._looked_at) < len(waiting):
            for sequence in waiting:
                if sequence not in self._looked_at and not (sequence.waits_for_leader or sequence.pending):
                    self._looked_at.add(sequence)
                    sequence.reads_disk = self._lacks(sequence) is not None
        self._begin_first(waiting, now)

    def _begin_first(self, waiting: Sequence[RequestSequence], now: float) -> None:
        # others that lack pages of the disk wait for their turn; sequences that lack none start before them
        reading, first = {read.sequence for read in self._reads.values()}, Counter[str]()
        readers = set[RequestSequence]()
        for sequence in waiting:
            if not (sequence.reads_disk or sequence in self._ready) or first[sequence.tenant] == MOST_READ_AHEAD:
                continue
            if self._scheduler.running and not self._scheduler.admits(sequence, now):
                continue
            first[sequence.tenant] += 1
            readers.add(sequence)
            if sequence.reads_disk and sequence not in reading:
                gap = self._lacks(sequence)
                sequence.reads_disk = gap is not None
                if gap is not None:
                    self._read(sequence, self._kv.open_in(sequence.context.root), gap)
        for sequence in [ready for ready in self._ready if ready not in readers]:
            self._kv.close(self._ready.pop(sequence))

    def next_s(self) -> float | None:
        """Time of the disk's next completion, in seconds of the engine's clock; None if the disk wakes the engine."""
        return self._disk.next_s()

    def end_reads(self) -> None:
        """Let the sequences start with the pages that have been read."""
        for key in list(self._reads):
            self._end(key)
        for sequence in self._looked_at:
            sequence.reads_disk = False
        for context in self._ready.values():
            self._kv.close(context)
        self._ready.clear()

    @property
    def contexts(self) -> list[Context]:
        """Contexts that share the pages that have been read."""
        return [*(read.context for read in self._reads.values()), *self._ready.values()]

    def _lacks(self, sequence: RequestSequence) -> range | None:
        # The first pages that are missing, on disk, and faster to read than to recompute.
        if sequence.wants_computation:
            return None
        tokens, kv = sequence.tokens, self._kv
        num_stored = self._disk.num_stored(sequence.context.root, tokens, (len(tokens) - 1) // kv.page_size)
        own, sides = sequence.context, kv.side_pool
        if not num_stored or (sides and own.num_pages >= num_stored and sides.can_go_on(own)):
            return None
        context = kv.open_in(sequence.context.root)
        kv.refresh(context, tokens)
        missing = [run.pages for run in context.runs() if run.residency is Residency.MISSING]
        missing.append(range(context.num_pages, num_stored))
        kv.close(context)
        gaps = (range(pages.start, min(pages.stop, num_stored)) for pages in missing)
        return next((gap for gap in gaps if gap and self._is_worth(gap)), None)

    def _read(self, sequence: RequestSequence, context: Context, gap: range) -> None:
        self._next_key += 1
        self._reads[self._next_key] = _Read(sequence, context, gap.stop)
        self._kv.refresh(context, sequence.tokens)
        self._kv.cut(context, gap.start * self._kv.page_size)
        if context.num_pages < gap.start:
            self._end(self._next_key)
        else:
            num_slots = self._kv.side_pool.num_slots(gap.stop) if self._kv.side_pool else 0
            self._disk.read(self._next_key, context.root, sequence.tokens, gap.start, len(gap), num_slots)

    def _arrive(self, piece: Any, read: _Read, now: float) -> None:
        kv, context = self._kv, read.context
        if kv.num_host_free < piece.num_pages:
            self._scheduler.free_host(read.sequence, read.end - context.num_pages, now)
        slots = kv.adopt(context, read.sequence.tokens, piece.num_pages)
        is_last = piece.side and context.num_pages == read.end
        side_slots = kv.side_pool.adopt(context) if kv.side_pool and is_last else ()
        self._disk.place(piece, slots, kv.take_dropped(), side_slots, kv.take_dropped_sides())
        self.read_tokens += kv.page_size * len(slots)
        is_cut_short = len(slots) < piece.num_pages or (piece.is_last and context.num_pages < read.end)
        gap = self._lacks(read.sequence) if piece.is_last and not is_cut_short else None
        if gap is not None:
            del self._reads[piece.key]
            self._read(read.sequence, context, gap)
        elif is_cut_short or piece.is_last:
            self._end(piece.key)

    def _end(self, key: int) -> None:
        self._disk.cancel(key)
        sequence, context, _ = self._reads.pop(key)
        sequence.reads_disk = False
        if sequence.state is State.WAITING:
            self._kv.refresh(sequence.context, sequence.tokens)
            num_tokens = sequence.context.num_pages * self._kv.page_size
            sequence.max_computed = max(sequence.max_computed, min(num_tokens, len(sequence.tokens) - 1))
        self._ready[sequence] = context

    def _is_worth(self, gap: range) -> bool:
        price, chunk, size = self._price, self._chunk_tokens, self._kv.page_size
        recompute_s = price.recompute_s(gap.stop * size, chunk) - price.recompute_s(gap.start * size, chunk)
        num_tokens = len(gap) * size
        if self._kv.side_pool:
            num_tokens += self._kv.side_pool.cost(self._kv.side_pool.num_slots(gap.stop))
        return return_s(recompute_s, price.disk_s(num_tokens), price.swap_s(num_tokens)) < recompute_s

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no pages are being read or written, and no paused context has pages to write."""
        num_paused = len(self._scheduler.intercepted) + len(self._scheduler.waiting)
        return not self._reads and not self._disk.num_writes and self._num_idle >= num_paused

    def write_behind(self, *, has_moved: bool) -> None:
        """Begin to write pages of paused contexts, the next ones in turn. `has_moved`: the host gets new copies."""
        if has_moved:
            self._num_idle = 0
        for context, num_stored in self._disk.poll_stored():
            self._busy.discard(context)
            context.num_stored = num_stored
            self._num_idle = 0
        for _ in range(_LOOKS):
            if self._disk.num_writes >= _MOST_WRITES:
                return
            if not self._round:
                self._round = [*self._scheduler.intercepted.values(), *self._scheduler.waiting]
                if not self._round:
                    return
                paused = {sequence.context for sequence in self._round}
                self._tried = {context: tried for context, tried in self._tried.items() if context in paused}
            sequence = self._round.pop()
            if sequence.state in (State.INTERCEPTED, State.WAITING):
                self._num_idle += 1
                self._write(sequence)

    def close(self) -> None:
        """Wait for writes, `CLOSE_S` at most, and close the disk."""
        self._disk.close(CLOSE_S)

    def _write(self, sequence: RequestSequence) -> None:
        context, size = sequence.context, self._kv.page_size
        num_full = len(sequence.tokens) // size
        if context in self._busy:
            return
        if context not in self._tried:
            self._busy.add(context)
            self._tried[context] = 0, 0
            self._disk.write(context, context.root, sequence.tokens[: num_full * size], 0, ())
            return
        first, (tried, last) = context.num_stored, self._tried[context]
        slots = self._kv.host_slots(context, first, _WRITTEN_PIECES * self._disk.piece_pages)
        end, side_slots = first + len(slots), ()
        if self._kv.side_pool:
            index, side_slots = self._kv.side_pool.copied(context, last, end)
            if index:  # a checkpoint is written with the page before it
                first, end, last = min(first, index - 1), index, index
                slots = self._kv.host_slots(context, first, end - first)
        if len(slots) == end - first > 0 and (side_slots or tried != end):
            self._busy.add(context)
            self._tried[context] = end, last
            self._disk.write(context, context.root, sequence.tokens[: end * size], first, slots, side_slots)
