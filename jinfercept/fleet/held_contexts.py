"""The conversations whose contexts a replica holds, by the keys of the front: what it reports to routers.

The engine evicts pages by value, page by page; here the conversations that were used last count as held, as many as the pools
have tokens for. A router that is wrong about one loses the time of one recomputation.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

MOST_ENTRIES = 65_536
MOST_REPORTED = 2_048
REPORTED_S = 60.0
"""Seconds for which a change is in the reports: several are lost on the way to a router."""


class HeldContext(NamedTuple):
    """A context.

    Attributes:
        tokens: of it; 0: it was evicted.
        changed_s: when it was used or evicted.
        counted: tokens of it that count, since a context has several keys.
    """

    tenant: str
    tokens: int
    changed_s: float
    counted: int


@final
class HeldContexts:
    """Contexts by key, the last used ones last.

    Args:
        most_tokens: of all pools together.
        now: a monotonic clock in seconds.
    """

    def __init__(self, most_tokens: int, now: Callable[[], float]) -> None:
        self._most_tokens, self._now = most_tokens, now
        self._held: OrderedDict[bytes, HeldContext] = OrderedDict()
        self._evicted: OrderedDict[bytes, HeldContext] = OrderedDict()
        self._counted = 0

    def use(self, tenant: str, keys: Sequence[bytes], tokens: int) -> None:
        """Note a finished request, whose context is found under `keys`. Its tokens count once."""
        for place, key in enumerate(keys):
            self._drop(key)
            self._evicted.pop(key, None)
            counted = tokens if place == 0 else 0
            self._held[key] = HeldContext(tenant, tokens, self._now(), counted)
            self._counted += counted
        while self._held and (self._counted > self._most_tokens or len(self._held) > MOST_ENTRIES):
            key = next(iter(self._held))
            context = self._drop(key)
            assert context is not None
            self._evicted[key] = HeldContext(context.tenant, 0, self._now(), 0)
            if len(self._evicted) > MOST_REPORTED:
                self._evicted.popitem(last=False)

    def _drop(self, key: bytes) -> HeldContext | None:
        context = self._held.pop(key, None)
        if context is not None:
            self._counted -= context.counted
        return context

    def report(self, everything: bool = False) -> list[tuple[str, bytes, int]]:
        """Tenant, key and tokens of the contexts that changed lately, the last used ones at most; or of all."""
        since = float("-inf") if everything else self._now() - REPORTED_S
        most = MOST_ENTRIES if everything else MOST_REPORTED
        reported = list[tuple[str, bytes, int]]()
        for table in (self._held, self._evicted):
            for key, context in reversed(table.items()):
                if context.changed_s < since or len(reported) >= most:
                    break
                reported.append((context.tenant, key, context.tokens))
        return reported
