"""Contexts of finished requests that stay for a follow-up request: keeps, finds, extends and drops them. Plans nothing.

To the scheduler a retained context is an intercepted sequence, which waits for a tool that the client runs or for the reader
of the answer. So one order of eviction covers all paused contexts, and a retained one loses its pages one by one. The number of
retained contexts is shared fairly between tenants (`Quota`), and no tenant finds or drops a context of another tenant.
"""

from array import array
from collections import Counter
from typing import NamedTuple, final

from jinfercept.engine.session import Session
from jinfercept.kv.extent import TOKEN_BYTES, common_pages, token_bytes
from jinfercept.request import Request
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import PendingCall, Sequence
from jinfercept.tenants.quota import Quota

MAX_CONTEXTS = 1024
"""Retained contexts. Beyond them the tenant that has most loses its oldest."""

MAX_AGE_S = 3600.0
"""Seconds after which a retained context is dropped."""


class _PromptPages(NamedTuple):
    """The full pages of a prompt: its tenant, the name of their tree, how many tokens they have, and those of the last page."""

    tenant: str
    root: bytes
    num_tokens: int
    last_page: bytes


class _Retained(NamedTuple):
    """A retained context.

    Attributes:
        sequence: the finished request's, intercepted.
        prompt: its full pages; None if it has none.
        session: the tenant, the name of the tree of the pages, so that no two salts share a session, and the session's name.
        ends_in_calls: whether the request's last turn ended in calls.
    """

    sequence: Sequence
    prompt: _PromptPages | None
    session: tuple[str, bytes, str] | None
    ends_in_calls: bool


@final
class RetainedContexts:
    """The retained contexts of one scheduler.

    Args:
        scheduler: holds their sequences.
        max_age_s: seconds after which one is dropped.
        max_per_tenant: retained contexts of one tenant; None: only `max_contexts` limits them.
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
        self._quota = Quota(max_contexts, most_of_tenant=max_per_tenant)
        self._contexts: dict[str, _Retained] = {}  # by request id, oldest first
        self._by_session: dict[tuple[str, bytes, str], str] = {}
        self._by_prompt: dict[_PromptPages, dict[str, None]] = {}
        self._prompt_lengths: dict[tuple[str, bytes], Counter[int]] = {}  # of those prompts, by tenant and tree
        self._unchecked: list[str] = []  # request ids that this round of `expire` has not come to

    def __len__(self) -> int:
        return len(self._contexts)

    def keep(self, session: Session, now: float) -> bool:
        """Retain the context of a finished request, if the request asks for it; False if the context is not retained.

        Under a policy that takes no page of a paused context while a sequence runs, nothing is retained.
        """
        follow_up, sequence = session.request.follow_up, session.sequence
        if follow_up is None or follow_up.last or self._scheduler.protects_paused:
            return False
        pending = tuple(
            session.pending(call, (sequence.id, "returns", index), follow_up.expected_s)
            for index, call in enumerate(session.client_calls)
        ) or (
            PendingCall(follow_up.reader, (sequence.id, "returns", 0), follow_up.expected_s, sequence.tenant, "reader"),
        )
        self._scheduler.intercept(sequence, now, pending)
        root, tenant, size = sequence.context.root, sequence.tenant, self._scheduler.kv.page_size
        num_full = len(session.request.prompt_token_ids) // size * size
        retained = _Retained(
            sequence,
            _PromptPages(tenant, root, num_full, token_bytes(sequence.tokens[num_full - size : num_full]))
            if num_full
            else None,
            (tenant, root, follow_up.session) if follow_up.session else None,
            bool(session.client_calls),
        )
        if retained.session is not None:
            self.drop(self._by_session.get(retained.session), now)
            self._by_session[retained.session] = sequence.id
        if retained.prompt is not None:
            self._by_prompt.setdefault(retained.prompt, {})[sequence.id] = None
            self._prompt_lengths.setdefault((tenant, root), Counter())[num_full] += 1
        self._contexts[sequence.id] = retained
        self._quota.add(tenant, sequence.id)
        while (name := self._quota.victim(tenant)) is not None:
            self.drop(name, now)
        return True

    def extend(self, request: Request, sequence: Sequence, now: float) -> bool:
        """Hand the retained context that a request follows to its new sequence, and queue that; False if it follows none.

        A retained context that the request or its session names, and that shares no full page with the request, is dropped.

        Args:
            sequence: of the request, not added to the scheduler yet.
        """
        retained, num_tokens = self._followed(request, sequence)
        if retained is None:
            return False
        if num_tokens < self._scheduler.kv.page_size or sequence.wants_computation:
            self.drop(retained.sequence.id, now)
            return False
        self._forget(retained)
        self._scheduler.extend(retained.sequence, sequence, num_tokens, now, in_place=retained.ends_in_calls)
        return True

    def drop(self, request_id: str | None, now: float) -> bool:
        """Drop a request's retained context: its private pages are free, its shareable ones cached. False if it has none."""
        retained = self._contexts.get(request_id) if request_id is not None else None
        if retained is None:
            return False
        self._forget(retained)
        self._scheduler.finish(retained.sequence, now)
        return True

    def expire(self, now: float) -> None:
        """Check one retained context, the next in turn: drop it if it is too old or has lost every page."""
        if not self._unchecked:
            self._unchecked = list(self._contexts)
        while self._unchecked:
            retained = self._contexts.get(self._unchecked.pop())
            if retained is not None:
                too_old = now - retained.sequence.paused_s > self._max_age_s
                if too_old or retained.sequence.context.is_lost:
                    self.drop(retained.sequence.id, now)
                return

    def clear(self, now: float) -> None:
        for request_id in list(self._contexts):
            self.drop(request_id, now)

    def keep_named(self) -> None:
        """From now on, only requests that name them follow the present contexts, by the finished request or by the session."""
        self._contexts = {name: retained._replace(prompt=None) for name, retained in self._contexts.items()}
        self._by_prompt, self._prompt_lengths = {}, {}

    def _followed(self, request: Request, sequence: Sequence) -> tuple[_Retained | None, int]:
        """The retained context that a request follows, and the number of leading tokens that they share."""
        tokens, context, tenant = sequence.tokens, sequence.context, sequence.tenant
        for name in (request.follows, self._session_of(request, sequence)):
            retained = self._contexts.get(name) if name is not None else None
            if retained is not None and (retained.sequence.tenant, retained.sequence.context.root) == (
                tenant,
                context.root,
            ):
                return retained, self._shared(retained.sequence, tokens)
        size = self._scheduler.kv.page_size
        for length in sorted(self._prompt_lengths.get((tenant, context.root), ()), reverse=True):
            page = token_bytes(tokens[length - size : length])
            if length < len(tokens) and (
                alike := self._by_prompt.get(_PromptPages(tenant, context.root, length, page))
            ):
                num_tokens, name = max((self._shared(self._contexts[name].sequence, tokens), name) for name in alike)
                if num_tokens >= length:
                    return self._contexts[name], num_tokens
        return None, 0

    def _session_of(self, request: Request, sequence: Sequence) -> str | None:
        follow_up = request.follow_up
        if follow_up is None or not follow_up.session:
            return None
        return self._by_session.get((sequence.tenant, sequence.context.root, follow_up.session))

    def _shared(self, retained: Sequence, tokens: array[int]) -> int:
        """Leading tokens that a retained sequence and a new one share, without the new one's last, which must be computed."""
        return common_pages(token_bytes(retained.tokens), token_bytes(tokens[:-1]), 0, TOKEN_BYTES)

    def _forget(self, retained: _Retained) -> None:
        name = retained.sequence.id
        del self._contexts[name]
        self._quota.remove(retained.sequence.tenant, name)
        if retained.session is not None and self._by_session.get(retained.session) == name:
            del self._by_session[retained.session]
        if retained.prompt is not None:
            names = self._by_prompt[retained.prompt]
            del names[name]
            if not names:
                del self._by_prompt[retained.prompt]
            lengths = self._prompt_lengths[retained.prompt[:2]]
            lengths[retained.prompt.num_tokens] -= 1
            lengths += Counter()  # without those that none has
            if not lengths:
                del self._prompt_lengths[retained.prompt[:2]]
