"""Conversations and their contexts, which stay for a follow-up request: keeps, finds, extends and drops them. Plans nothing.

To the scheduler a retained context is an intercepted sequence, which waits for a tool that the client runs or for the reader
of the answer. So one order of eviction covers all paused contexts, and a retained one loses its pages one by one. A
conversation that has lost all of them, or whose last request was aborted, stays without a context: its next request does not
wait at the door, and a client that gives up and asks again goes on waiting where it was. The number of conversations is shared
fairly between tenants (`Quota`), and no tenant finds or drops one of another tenant.
"""

from array import array
from typing import NamedTuple, final

from jinfercept.engine.session import Session
from jinfercept.kv.extent import TOKEN_BYTES, common_pages, token_bytes
from jinfercept.request import Request
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import PendingCall, Sequence, State
from jinfercept.sched.tenants import Quota

MAX_CONTEXTS = 1024
"""Conversations. Beyond them the tenant that has most loses its oldest."""

MAX_AGE_S = 3600.0
"""Seconds after which a conversation is forgotten."""

AGAIN_S = 300.0
"""Seconds for which an aborted request keeps its place for one that repeats it; of one that had a token, since it arrived."""


class _Retained(NamedTuple):
    """A conversation.

    Attributes:
        sequence: of its last request, intercepted; or finished, if it has no context.
        prompt_tokens: tokens on the full pages of its prompt; 0: requests with this prompt do not follow it.
        session: name of the session; "" if it has none.
        holder: what it counts to in the quota.
        keeps_place: whether the follow-up waits by the arrival of the last request, which ended in calls or was aborted.
    """

    sequence: Sequence
    prompt_tokens: int
    session: str
    holder: str
    keeps_place: bool


@final
class RetainedContexts:
    """The conversations of one scheduler.

    Args:
        scheduler: holds their sequences.
        max_age_s: seconds after which one is forgotten.
        max_per_tenant: conversations of one tenant; None: only `max_contexts` limits them.

    Attributes:
        sequences: of the finished requests that have a context, by id, intercepted.
        groups: all conversations by the tenant and the name of the tree of their pages: no two tenants or salts share any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_contexts: int = MAX_CONTEXTS,
        max_age_s: float = MAX_AGE_S,
        *,
        max_per_tenant: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._max_age_s = max_age_s
        self._quota = Quota[str](max_contexts, most_of_tenant=max_per_tenant)
        self.sequences: dict[str, Sequence] = {}
        self._without: dict[str, Sequence] = {}  # of conversations that have no context
        self.groups: dict[tuple[str, bytes], dict[str, _Retained]] = {}
        self._unchecked: list[str] = []  # request ids that this round of `expire` has not come to

    def keep(self, session: Session, now: float) -> bool:
        """Retain the context of a finished request that expects a follow-up; False if the context is not retained.

        Under a policy that takes no page of a paused context while a sequence runs, nothing is retained.
        """
        follow_up, sequence = session.request.follow_up, session.sequence
        assert follow_up is not None
        if follow_up.last or self._scheduler.protects_paused:
            return False
        pending = tuple(
            session.pending(call, (sequence.id, "returns", index))._replace(expected_s=follow_up.expected_s)
            for index, call in enumerate(session.client_calls)
        ) or (
            PendingCall(follow_up.reader, (sequence.id, "returns", 0), follow_up.expected_s, sequence.tenant, "reader"),
        )
        self._scheduler.intercept(sequence, now, pending)
        self.sequences[sequence.id] = sequence
        self._add(session, sequence.tenant, bool(session.client_calls), now)
        return True

    def remember(self, session: Session, now: float) -> None:
        """Remember the conversation of an aborted request, and its place.

        Else the prompts of impatient clients, half computed for each, would evict each other for ever. It counts apart from the
        tenant's others: clients that ask and leave make no conversation be forgotten whose requests finished.
        """
        session.sequence.paused_s = now
        self._without[session.sequence.id] = session.sequence
        self._add(session, f"{session.sequence.tenant} aborted", True, now)

    def _add(self, session: Session, holder: str, keeps_place: bool, now: float) -> None:
        request, sequence, size = session.request, session.sequence, self._scheduler.kv.page_size
        name = request.follow_up.session if request.follow_up is not None else ""
        if name and (before := _of_session(self.groups.get(_group_of(sequence), {}), name)) is not None:
            self.drop(before.sequence.id, now)
        num_full = len(request.prompt_token_ids) // size * size
        retained = _Retained(sequence, num_full, name, holder, keeps_place)
        self.groups.setdefault(_group_of(sequence), {})[sequence.id] = retained
        self._quota.add(holder, sequence.id)
        while (victim := self._quota.victim(holder)) is not None:
            self.drop(victim, now)

    def extend(self, request: Request, sequence: Sequence, now: float) -> bool:
        """Queue the sequence of a request that goes on with a known conversation, on its retained context if it has one; False
        if it begins one.

        A retained context that the request or its session names, and that shares no full page with the request, is dropped;
        so is that of a finished request with the same id.

        Args:
            sequence: of the request, not added to the scheduler yet.
        """
        if request.id in self.sequences:
            self.drop(request.id, now)
        retained = self._followed(request, sequence)
        if retained is None or retained.sequence.id != request.id:
            self.drop(request.id, now)
        if retained is None:
            return False
        before, scheduler = retained.sequence, self._scheduler
        has_context, num_tokens = before.state is State.INTERCEPTED, _shared(before, sequence.tokens)
        if has_context and num_tokens >= scheduler.kv.page_size and not sequence.wants_computation:
            self._forget(before)
            scheduler.extend(before, sequence, num_tokens, now, in_place=retained.keeps_place)
            return True
        waited_s = now - (before.since_s if before.generated else before.paused_s)
        again = not has_context and retained.keeps_place and waited_s <= AGAIN_S
        self.drop(before.id, now)
        scheduler.add(sequence, before if again else None, at_door=now if before.at_door else None)
        return True

    def drop(self, request_id: str, now: float) -> bool:
        """Forget a request's conversation: the private pages of its context are free, its shareable ones cached. False if it is
        not known."""
        sequence = self.sequences.get(request_id) or self._without.get(request_id)
        if sequence is None:
            return False
        self._forget(sequence)
        self._scheduler.finish(sequence, now)
        return True

    def expire(self, now: float) -> None:
        """Check one conversation with a context, the next in turn, and the first of those without: forget what is too old, and
        a context that has no page left."""
        oldest = next(iter(self._without.values()), None)
        if oldest is not None and now - oldest.paused_s > self._max_age_s:
            self.drop(oldest.id, now)
        if not self._unchecked:
            self._unchecked = list(self.sequences)
        while self._unchecked:
            sequence = self.sequences.get(self._unchecked.pop())
            if sequence is not None:
                if now - sequence.paused_s > self._max_age_s:
                    self.drop(sequence.id, now)
                elif sequence.context.is_lost:
                    self._without[sequence.id] = self.sequences.pop(sequence.id)
                    self._scheduler.finish(sequence, now)
                    group = self.groups[_group_of(sequence)]
                    group[sequence.id] = group[sequence.id]._replace(keeps_place=False)
                return

    def clear(self, now: float) -> None:
        for request_id in (*self.sequences, *self._without):
            self.drop(request_id, now)

    def keep_named(self) -> None:
        """From now on, only requests that name them follow the present contexts, by the finished request or by the session."""
        for group in self.groups.values():
            group.update({name: retained._replace(prompt_tokens=0) for name, retained in group.items()})

    def _followed(self, request: Request, sequence: Sequence) -> _Retained | None:
        """The conversation that a request names, or its session; else the one whose prompt the request goes on from, the
        longest of these prompts, and where several have it the one that shares most tokens."""
        group, tokens, size = self.groups.get(_group_of(sequence), {}), sequence.tokens, self._scheduler.kv.page_size
        if request.follows is not None and (named := group.get(request.follows)) is not None:
            return named
        follow_up = request.follow_up
        if follow_up is not None and follow_up.session and (of_session := _of_session(group, follow_up.session)):
            return of_session
        best, best_key = None, (0, 0, "")
        for name, retained in group.items():
            end, before = retained.prompt_tokens, retained.sequence.tokens
            if best_key[0] <= end <= len(tokens) and end and tokens[end - size : end] == before[end - size : end]:
                key = end, _shared(retained.sequence, tokens), name
                if tokens[:end] == before[:end] and key > best_key:
                    best, best_key = retained, key
        return best

    def _forget(self, sequence: Sequence) -> None:
        group = self.groups[_group_of(sequence)]
        del (self.sequences if sequence.id in self.sequences else self._without)[sequence.id]
        self._quota.remove(group.pop(sequence.id).holder, sequence.id)
        if not group:
            del self.groups[_group_of(sequence)]


def _group_of(sequence: Sequence) -> tuple[str, bytes]:
    return sequence.tenant, sequence.context.root


def _of_session(group: dict[str, _Retained], name: str) -> _Retained | None:
    return next((retained for retained in group.values() if retained.session == name), None)


def _shared(retained: Sequence, tokens: array[int]) -> int:
    """Leading tokens that a retained sequence and a new one share, without the new one's last, which must be computed."""
    return common_pages(token_bytes(retained.tokens), token_bytes(tokens[:-1]), 0, TOKEN_BYTES)
