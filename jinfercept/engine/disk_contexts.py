"""Contexts on disk: what a new request needs of them is read before it is queued, and paused contexts are written behind.

Pages are read into the host's memory where that takes less time than to recompute them, and are then as any prefix on the host.
Full pages of paused contexts are written as soon as the host has copies of them: a disk never takes a device's link or a step.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, final

from jinfercept.kv.context import Context
from jinfercept.kv.page import Residency
from jinfercept.request import Request
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import Sequence as RequestSequence

_LOOKS = 8
"""Paused contexts that a step looks at."""
_MOST_WRITES = 2
CLOSE_S = 20.0
"""Seconds that the end of an engine waits for what is still to be written."""


class PageDisk(Protocol):
    """Reads and writes pages in the background; `runner.disk_pages.DiskPages` says what its methods do. No method waits."""

    @property
    def piece_pages(self) -> int: ...
    @property
    def num_writes(self) -> int: ...
    def num_stored(self, root: bytes, tokens: Sequence[int]) -> int: ...
    def read(self, key: str, root: bytes, tokens: Sequence[int], first: int, num_pages: int) -> None: ...
    def cancel(self, key: str) -> None: ...
    def poll_read(self) -> Sequence[Any]: ...
    def place(self, piece: Any, slots: Sequence[int | None], dropped: Sequence[int]) -> None: ...
    def count(self, key: Hashable, root: bytes, tokens: Sequence[int]) -> None: ...
    def write(self, key: Hashable, root: bytes, tokens: Sequence[int], first: int, slots: Sequence[int]) -> None: ...
    def poll_stored(self) -> list[tuple[Hashable, int]]: ...
    def next_s(self) -> float | None: ...
    def close(self, longest_s: float) -> None: ...


class ReadPrice(Protocol):
    """Seconds of the two ways to have pages that are on disk: the third way of the waste equations, and their second."""

    def disk_s(self, num_tokens: int) -> float: ...
    def swap_s(self, num_tokens: int) -> float: ...
    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float: ...


class _Awaiting(NamedTuple):
    """A request whose pages are being read, and a context that has those that have arrived."""

    request: Request
    context: Context


@final
class DiskContexts:
    """The contexts of one scheduler that are on disk. Used by the engine's thread.

    Args:
        scheduler: has the paused contexts.
        disk: has the pages.
        price: of reading and of recomputing.
        chunk_tokens: of a step that recomputes.

    Attributes:
        read_tokens: that were read instead of recomputed.
    """

    def __init__(self, scheduler: Scheduler, disk: PageDisk, price: ReadPrice, chunk_tokens: int) -> None:
        self._scheduler, self._kv, self._disk = scheduler, scheduler.kv, disk
        self._price, self._chunk_tokens = price, chunk_tokens
        self._awaiting: dict[str, _Awaiting] = {}
        self._stored: dict[
            Context, int | None
        ] = {}  # leading pages of paused contexts; None: they are being counted or written
        self._refused: dict[Context, int] = {}  # pages up to which a write was tried in vain
        self._round: list[RequestSequence] = []
        self._num_idle = 0  # contexts since the last one of which something was written
        self.read_tokens = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Requests that wait for the disk."""
        return len(self._awaiting)

    def begin(self, request: Request) -> bool:
        """Read what a new request needs; False if nothing is to be read, and the request can be opened now."""
        if request.params.prompt_logprobs is not None:
            return False
        tokens, size = request.prompt_token_ids, self._kv.page_size
        num_full = (len(tokens) - 1) // size
        context = self._kv.open(request.cache_salt)
        num_stored = min(num_full, self._disk.num_stored(context.root, tokens))
        if num_stored:
            self._kv.refresh(context, tokens)
        missing = [run.start for run in context.runs() if run.residency is Residency.MISSING]
        num_known = min([context.num_pages, *missing])
        self._kv.cut(context, num_known * size)
        if num_stored <= num_known or not self._is_worth(num_known * size, num_stored * size):
            self._kv.close(context)
            return False
        self._awaiting[request.id] = _Awaiting(request, context)
        self._disk.read(request.id, context.root, tokens, num_known, num_stored - num_known)
        return True

    def arrived(self, open_request: Callable[[Request], RequestSequence | None]) -> None:
        """Give the host the pages that were read, and open the requests that wait for no more.

        Args:
            open_request: queues a request; returns its sequence, None if it has ended already.
        """
        for piece in self._disk.poll_read():
            awaiting = self._awaiting.get(piece.key)
            if awaiting is None:  # the host had no room for the piece before
                continue
            slots = self._kv.adopt(awaiting.context, awaiting.request.prompt_token_ids, piece.num_pages)
            self._disk.place(piece, slots, self._kv.take_dropped())
            self.read_tokens += self._kv.page_size * len(slots)
            if piece.is_last or len(slots) < piece.num_pages:
                self.give_up(piece.key, open_request)

    def give_up(self, request_id: str, open_request: Callable[[Request], RequestSequence | None]) -> None:
        """Open a request with the pages that have been read, if it waits for any."""
        if request_id not in self._awaiting:
            return
        self._disk.cancel(request_id)
        request, context = self._awaiting.pop(request_id)
        sequence = open_request(request)
        if sequence is not None and not sequence.context.held:
            self._kv.refresh(sequence.context, sequence.tokens)
            num_tokens = sequence.context.num_pages * self._kv.page_size
            sequence.max_computed = max(sequence.max_computed, min(num_tokens, len(sequence.tokens) - 1))
        self._kv.close(context)

    def give_up_all(self, open_request: Callable[[Request], RequestSequence | None]) -> None:
        """Open every request that waits."""
        for request_id in list(self._awaiting):
            self.give_up(request_id, open_request)

    def next_s(self) -> float | None:
        """When the disk has read or written next, in seconds of the engine's clock; None if it wakes the engine."""
        return self._disk.next_s()

    def forget_waiting(self) -> None:
        """Drop the requests that wait, and what was read for them."""
        for request_id, (_, context) in self._awaiting.items():
            self._disk.cancel(request_id)
            self._kv.close(context)
        self._awaiting.clear()

    @property
    def contexts(self) -> list[Context]:
        """Those of requests that wait."""
        return [awaiting.context for awaiting in self._awaiting.values()]

    def _is_worth(self, start: int, end: int) -> bool:
        """Whether to read the KV of the tokens `start … end - 1` takes less time than to recompute it."""
        price, chunk = self._price, self._chunk_tokens
        recompute_s = price.recompute_s(end, chunk) - price.recompute_s(start, chunk)
        return price.disk_s(end - start) + price.swap_s(end - start) < recompute_s

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no request waits, and nothing of paused contexts is to be written."""
        return not self._awaiting and not self._disk.num_writes and self._num_idle >= len(self._scheduler.intercepted)

    def write_behind(self, *, has_moved: bool) -> None:
        """Begin to write pages of paused contexts, the next ones in turn.

        Args:
            has_moved: the host gets copies that it did not have.
        """
        if has_moved:
            self._num_idle = 0
        for context, num_stored in self._disk.poll_stored():
            if context in self._stored:
                self._stored[context] = num_stored  # pyright: ignore[reportArgumentType] # its key is a context
                self._num_idle = 0
        for _ in range(_LOOKS):
            if self._disk.num_writes >= _MOST_WRITES or not self._scheduler.intercepted:
                return
            if not self._round:
                self._round = list(self._scheduler.intercepted.values())
                paused = {sequence.context for sequence in self._round}
                self._stored = {context: stored for context, stored in self._stored.items() if context in paused}
                self._refused = {context: tried for context, tried in self._refused.items() if context in paused}
            sequence = self._round.pop()
            if sequence.id in self._scheduler.intercepted:
                self._num_idle += 1
                self._write(sequence)

    def close(self) -> None:
        """Wait for what is being written, and end."""
        self._disk.close(CLOSE_S)

    def _write(self, sequence: RequestSequence) -> None:
        context, size = sequence.context, self._kv.page_size
        num_full = len(sequence.tokens) // size
        if context not in self._stored:
            self._stored[context] = None
            self._disk.count(context, context.root, sequence.tokens[: num_full * size])
            return
        first = self._stored[context]
        if first is None or first >= num_full:
            return
        slots = self._kv.host_copies(context, first, self._disk.piece_pages)
        end = first + len(slots)
        if slots and self._refused.get(context) != end:
            self._stored[context] = None
            self._refused[context] = end
            self._disk.write(context, context.root, sequence.tokens[: end * size], first, slots)
