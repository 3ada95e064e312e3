"""Conversations and their contexts, which stay for a follow-up request: keeps, finds, extends and drops them. Plans nothing.

A conversation that has lost all pages, or whose last request was aborted, stays without a context. Its next request does not
wait at the door, and a client that repeats an aborted request keeps its place.
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
"""Seconds for which an aborted request keeps its place for one that repeats it.

They count from the abort; if the request had generated a token, from the time when it began to wait for its next one."""


class _Retained(NamedTuple):
    sequence: Sequence  # of the last request: intercepted, or finished if there is no context
    prompt_tokens: int  # on full pages of the prompt; 0: requests that begin with this prompt do not follow it
    session: str  # "" if it has no name
    holder: str  # in the quota
    keeps_place: bool  # the follow-up waits by the arrival of the last request, which ended in calls or was aborted


@final
class RetainedContexts:
    """The conversations of one scheduler, whose number tenants share fairly. No tenant finds or drops one of another tenant.

    Args:
        max_age_s: seconds after which a conversation is forgotten.
        max_per_tenant: conversations of one tenant; None: only `max_contexts` limits them.
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
        self.sequences: dict[str, Sequence] = {}  # of finished requests that have a context, by id, intercepted
        self._without: dict[str, Sequence] = {}  # of conversations that have no context
        # By the tenant and the root of their pages: no two tenants or salts share any.
        self.groups: dict[tuple[str, bytes], dict[str, _Retained]] = {}
        self._unchecked: list[str] = []  # request ids that this round of `expire` has not come to

    def keep(self, session: Session, now: float) -> bool:
        """Retain the context of a finished request that expects a follow-up; False if the context is not retained."""
        follow_up, sequence = session.request.follow_up, session.sequence
        assert follow_up is not None
        # a policy that takes no page of a paused context while a sequence runs retains nothing
        if follow_up.last or self._scheduler.protects_paused:
            return False
        pending = tuple(
            session.pending(call, (sequence.id, "returns", index))._replace(expected_s=follow_up.expected_s)
            for index, call in enumerate(session.client_calls)
        ) or (
            PendingCall(follow_up.reader, (sequence.id, "returns", 0), follow_up.expected_s, sequence.tenant, "reader"),
        )
        # To the scheduler, a retained context waits for a tool that the client runs or for the reader of the answer. So one
        # order of eviction covers all paused contexts, and a retained one loses its pages one by one.
        self._scheduler.intercept(sequence, now, pending)
        self.sequences[sequence.id] = sequence
        self._add(session, sequence.tenant, bool(session.client_calls), now)
        return True

    def remember(self, session: Session, now: float) -> None:
        """Remember the conversation of an aborted request, and its place."""
        # If their place were lost, the half-computed prompts of impatient clients would evict each other for ever. Aborted
        # conversations have a quota of their own, so that they never push out conversations whose requests finished.
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
        """Queue a request that goes on with a known conversation, on its retained context if there is one. False: it begins
        one.

        A retained context that the request or its session names is dropped if it shares no full page with the request. So is
        the context of a finished request with the same id.

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
        """Forget a request's conversation. Its private pages are free, its shareable ones cached. False if there is none."""
        sequence = self.sequences.get(request_id) or self._without.get(request_id)
        if sequence is None:
            return False
        self._forget(sequence)
        self._scheduler.finish(sequence, now)
        return True

    def expire(self, now: float) -> None:
        """Check the next conversation with a context, and the oldest without: forget what is too old or has lost all pages."""
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
        """Let only requests that name a present context, by its finished request or by its session, follow it from now on."""
        for group in self.groups.values():
            group.update({name: retained._replace(prompt_tokens=0) for name, retained in group.items()})

    def _followed(self, request: Request, sequence: Sequence) -> _Retained | None:
        # A conversation that the request names comes first, then that of its session. Of the others, the request follows the
        # one with the longest prompt that it begins with; among equal prompts, the one that shares most tokens.
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
    # without the new sequence's last token, which must be computed
    return common_pages(token_bytes(retained.tokens), token_bytes(tokens[:-1]), 0, TOKEN_BYTES)
