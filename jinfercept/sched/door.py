"""The door: where new conversations wait until the requests of those inside are in time and memory has room.

A conversation is a chain of requests, each of which continues the one before. The door orders nothing inside and plans
nothing. Once a conversation is inside, none of its requests waits here again. A new one comes in when both of these hold:

* No request inside, of the same tenant and of the same or a more urgent priority, is late, and the new tokens of these
  requests would not make the new one late. `LATE_S` and `LATE_TOKEN_S` define lateness.
* Its context has room in the device's and the host's pools together, or in its tenant's equal share of them, or fewer than
  `MOST_LATE` of the last turns were late.

A tenant without a conversation inside has a right to one. A tenant that waits keeps no other tenant out of its share.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.profile import CostModel
from jinfercept.sched.queues import Queues
from jinfercept.sched.sequence import Sequence

Overload = Literal["queue", "refuse", "serve"]
"""What happens to conversations that cannot come in: they wait at the door, are refused, or come in all the same."""

LATE_S, LATE_TOKEN_S = 2.0, 1e-4
"""A request inside is late after this many seconds, plus so many more for each of its new tokens."""
MOST_LATE, RECENT = 0.05, 0.01
"""Share of late turns, and the weight of the newest turn in it."""
FIRST_GROWTH, GROWTH = 4, 2
"""About how many times larger the last context of a conversation is than its first one, and than the one with which it
returns."""
IDLE_S = 120.0
"""Seconds of a pause after which a context takes no room. Of 20 calls of a coding agent's tools, 19 last less than 154 s."""
LOOK_S = 0.1
"""Seconds between two searches for room."""
MOST_DOOR_S = 900.0
"""Seconds after which a request at the door is refused. A client that repeats it soon gets its place back, as after any
request that leaves the door."""
RETRY_S = 30
"""Seconds after which a refused client should come again. Conversations last minutes, and clients heed at most one."""


@final
class Door:
    """The conversations that wait at the door of one scheduler."""

    def __init__(self, kv: KVManager, queues: Queues, cost: CostModel, chunk_tokens: int, overload: Overload) -> None:
        self.overload: Overload = overload
        # the conversations' first requests, in the order in which they come in if tenants have equal shares
        self.sequences: list[Sequence] = []
        self._queues = queues
        pools = kv.occupancy()
        self._room = (pools.total + pools.host_total) * kv.page_size
        self._cost, self._chunk_tokens = cost, chunk_tokens
        self._large = bisect_right(range(self._room + 1), LATE_S, key=self._compute_s)
        self._late = 0.0  # share of the last turns
        self._next_look_s = 0.0

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue the first request of a new conversation, and let it in if possible."""
        sequence.at_door = True
        self.sequences.append(sequence)
        self.sequences.sort(key=lambda sequence: (sequence.priority, sequence.since_s))
        self._next_look_s = now
        self.open(now)

    def overdue(self, now: float) -> list[Sequence]:
        return [sequence for sequence in self.sequences if now - sequence.arrival_s > MOST_DOOR_S]

    def started(self, sequence: Sequence, now: float) -> None:
        """Note whether a turn that starts inside is late."""
        lost_s = self._compute_s(sequence.usage.residency.missing)
        self._late += RECENT * (_is_late(sequence, now + lost_s) - self._late)

    def open(self, now: float) -> None:
        """Let conversations in, as far as they may. Called first in every plan while some wait."""
        if now < self._next_look_s:
            return
        inside, room = defaultdict[str, int](int), self._room  # tokens by tenant, and for new ones
        for sequence in self._inside(now):
            inside[sequence.tenant] += sequence.length
            room -= self._needs(sequence)
        shut = set[str]()  # tenants
        # the smallest priority comes in first, then the tenant with the fewest tokens inside over its weight, then the
        # longest wait
        while first := min(
            (sequence for sequence in self.sequences if sequence.tenant not in shut),
            key=lambda sequence: (sequence.priority, inside[sequence.tenant] / sequence.weight),
            default=None,
        ):
            ahead = [it for it in self._waiting() if it.tenant == first.tenant and it.priority <= first.priority]
            ahead_s = sum(self._compute_s(sequence.length - sequence.max_computed) for sequence in ahead)
            is_late = _is_late(first, first.since_s + ahead_s) or any(_is_late(sequence, now) for sequence in ahead)
            has_room = (
                self._needs(first) <= max(0, room)
                or GROWTH * (inside[first.tenant] + first.length) * len(inside) <= self._room
            )
            if inside[first.tenant] and (is_late or not (has_room or self._late < MOST_LATE)):
                self._next_look_s = now + LOOK_S
                shut.add(first.tenant)
                if not is_late:
                    room = 0  # what there is, is for this one
                continue
            if not has_room:
                # It counts as this many late turns: about 70 turns must be on time before the next one comes in without room.
                # The harm shows late, when its context has grown.
                self._late += MOST_LATE
            self.sequences.remove(first)
            first.at_door, first.door_s, first.since_s = False, now - first.arrival_s, now
            self._queues.put_last(first)
            inside[first.tenant] += first.length
            room -= self._needs(first)

    def _compute_s(self, num_tokens: int) -> float:
        return self._cost.recompute_s(num_tokens, self._chunk_tokens) if num_tokens else 0.0

    def _needs(self, sequence: Sequence) -> int:
        # Contexts go on to grow. One that is recomputed within `LATE_S` when it has grown makes no turn late where it is
        # lost.
        grown = (FIRST_GROWTH if sequence.usage.retained is None else GROWTH) * sequence.length
        return grown if grown >= self._large else 0

    def _waiting(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queues.waiting if sequence.may_start)  # its leader may wait at the door

    def _inside(self, now: float) -> Iterator[Sequence]:
        yield from self._queues.running
        yield from self._waiting()
        # Paused contexts that are about to return: these have returned before, or wait for a tool. A last answer and a tool
        # that never answers keep no conversation out.
        for sequence in self._queues.intercepted.values():
            if now - sequence.paused_s < IDLE_S and _returns(sequence):
                yield sequence


def _is_late(sequence: Sequence, now: float) -> bool:
    return now - sequence.since_s > LATE_S + LATE_TOKEN_S * (sequence.length - sequence.max_computed)


def _returns(sequence: Sequence) -> bool:
    return sequence.usage.retained is not None or any(call.kind != "reader" for call in sequence.calls)
