"""Contexts of finished requests that somebody is expected to go on from: kept, found again, given up. Plans nothing.

To the scheduler such a request is intercepted: by the tools that its caller runs for it, or by a person who reads the answer.
So there is one order of loss for all who are paused, and what nobody comes back for is lost first, page by page. The number of
kept contexts is shared fairly between tenants (`Quota`), and no tenant finds or drops a context of another's.
"""

from bisect import bisect_left
from collections import abc
from itertools import takewhile
from operator import eq
from typing import NamedTuple, final

from jinfercept.engine.session import Session
from jinfercept.kv.page import Residency
from jinfercept.quota import Quota
from jinfercept.request import Request
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import PendingCall, Sequence

MOST = 1024
"""Kept contexts. Of the tenant that has the most of them the one kept longest goes first."""

LONGEST_S = 3600.0
"""Seconds for which one is kept."""


class _Retained(NamedTuple):
    """A kept context.

    Attributes:
        sequence: intercepted.
        prompt: the tenant, and the name of the last full page of its prompt; None if there is none.
        session: the tenant, the root of its pages, so that no two salts share a session, and the session's name.
        asked: its turn ended in calls.
    """

    sequence: Sequence
    prompt: tuple[str, bytes] | None
    session: tuple[str, bytes, str] | None
    asked: bool


@final
class RetainedContexts:
    """The kept contexts of one scheduler.

    Args:
        scheduler: to which they are intercepted.
        most: that are kept.
        longest_s: that one is kept for.
        most_of_owner: that are kept for one tenant; None: no more than `most`.
    """

    def __init__(
        self, scheduler: Scheduler, most: int = MOST, longest_s: float = LONGEST_S, *, most_of_owner: int | None = None
    ) -> None:
        self._scheduler = scheduler
        self._longest_s = longest_s
        self._quota = Quota(most, most_of_owner=most_of_owner)
        self._kept: dict[str, _Retained] = {}  # by request, longest kept first
        self._by_session: dict[tuple[str, bytes, str], str] = {}
        self._by_prompt: dict[tuple[str, bytes], dict[str, None]] = {}
        self._turns: list[str] = []  # who is looked at next

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: Session, now: float) -> bool:
        """Keep the context of a session that ends here, if its request asks for that; False if it is to be finished.

        Under a policy that takes no page of a paused context while anybody runs, nothing is kept.
        """
        keep, sequence = session.request.keep, session.sequence
        if keep is None or keep.last or self._scheduler.protects_paused:
            return False
        pending = tuple(
            session.pending(call, (sequence.id, "returns", index), keep.expected_s)
            for index, call in enumerate(session.asked)
        ) or (PendingCall(keep.reader, (sequence.id, "returns", 0), keep.expected_s, sequence.tenant, "reader"),)
        self._scheduler.intercept(sequence, now, pending)
        root, chain, tenant = sequence.context.root, sequence.context.chain, sequence.tenant
        num_full = len(session.request.prompt_token_ids) // self._scheduler.kv.page_size
        kept = _Retained(
            sequence,
            (tenant, chain[num_full - 1]) if 0 < num_full <= len(chain) else None,
            (tenant, root, keep.session) if keep.session else None,
            bool(session.asked),
        )
        if kept.session is not None:
            self.drop(self._by_session.get(kept.session), now)
            self._by_session[kept.session] = sequence.id
        if kept.prompt is not None:
            self._by_prompt.setdefault(kept.prompt, {})[sequence.id] = None
        self._kept[sequence.id] = kept
        self._quota.add(tenant, sequence.id)
        while (name := self._quota.victim(tenant)) is not None:
            self.drop(name, now)
        return True

    def follow(self, request: Request, sequence: Sequence, now: float) -> bool:
        """Let a new sequence go on from the kept one that it follows; False if there is none.

        A kept one that the request names, or whose session it names, and that has nothing in common with it, is given up.

        Args:
            request: whose sequence it is.
            sequence: not added yet.
        """
        kept, num_tokens = self._followed(request, sequence)
        if kept is None:
            return False
        if num_tokens < self._scheduler.kv.page_size or sequence.wants_scores:
            self.drop(kept.sequence.id, now)
            return False
        self._forget(kept)
        self._scheduler.follow(kept.sequence, sequence, num_tokens, now, in_place=kept.asked)
        return True

    def drop(self, request_id: str | None, now: float) -> bool:
        """Give up a kept context: what it has alone is free, what others could use is a finished prefix."""
        kept = self._kept.get(request_id) if request_id is not None else None
        if kept is None:
            return False
        self._forget(kept)
        self._scheduler.finish(kept.sequence, now)
        return True

    def look(self, now: float) -> None:
        """Look at one of them, and give it up if it was kept too long or has no page left."""
        if not self._turns:
            self._turns = list(self._kept)
        while self._turns:
            kept = self._kept.get(self._turns.pop())
            if kept is not None:
                pages = kept.sequence.context.pages
                too_long = now - kept.sequence.paused_s > self._longest_s
                if too_long or all(page.residency is Residency.MISSING for page in pages):
                    self.drop(kept.sequence.id, now)
                return

    def clear(self, now: float) -> None:
        """Give up all of them."""
        for request_id in list(self._kept):
            self.drop(request_id, now)

    def _followed(self, request: Request, sequence: Sequence) -> tuple[_Retained | None, int]:
        """The kept one that a request goes on from, and how many leading tokens they share."""
        tokens, context, tenant = sequence.tokens, sequence.context, sequence.tenant
        for name in (request.follows, self._session_of(request, sequence)):
            kept = self._kept.get(name) if name is not None else None
            if kept is not None and (kept.sequence.tenant, kept.sequence.context.root) == (tenant, context.root):
                return kept, self._shared(kept.sequence, tokens)
        names = self._scheduler.kv.names(context, tokens)
        for digest in reversed(names):
            if alike := self._by_prompt.get((tenant, digest)):
                found = [(self._shared(self._kept[name].sequence, tokens, names), name) for name in alike]
                num_tokens, name = max(found)
                return self._kept[name], num_tokens
        return None, 0

    def _session_of(self, request: Request, sequence: Sequence) -> str | None:
        keep = request.keep
        if keep is None or not keep.session:
            return None
        return self._by_session.get((sequence.tenant, sequence.context.root, keep.session))

    def _shared(self, kept: Sequence, tokens: list[int], names: abc.Sequence[bytes] = ()) -> int:
        """Leading tokens that a kept sequence and a new one have in common; the new one's last is left to be computed.

        Args:
            kept: has the same root.
            tokens: of the new one.
            names: of its full pages; each stands for all pages up to it, so that few are compared, and no tokens before them.
        """
        size, chain, end = self._scheduler.kv.page_size, kept.context.chain, len(tokens) - 1
        num_pages = min(len(chain), len(names), end // size)
        alike = bisect_left(range(num_pages), True, key=lambda place: chain[place] != names[place])
        start = alike * size
        if alike < num_pages:
            end = start + size
        return start + sum(1 for _ in takewhile(bool, map(eq, kept.tokens[start:end], tokens[start:end])))

    def _forget(self, kept: _Retained) -> None:
        name = kept.sequence.id
        del self._kept[name]
        self._quota.remove(kept.sequence.tenant, name)
        if kept.session is not None and self._by_session.get(kept.session) == name:
            del self._by_session[kept.session]
        if kept.prompt is not None:
            names = self._by_prompt[kept.prompt]
            del names[name]
            if not names:
                del self._by_prompt[kept.prompt]
