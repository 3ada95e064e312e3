"""The table of keys that a router knows, with the replicas that hold their contexts: bounded, and fair to tenants.

While there are too many keys, the tenant that holds the most loses its oldest ones (`Quota`).
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import final

from jinfercept.sched.tenants import Quota

MOST_CONTEXTS = 65_536
"""Contexts of one replica that are known."""

type TenantKey = tuple[str, bytes]
"""A tenant, and a key of one of its contexts."""


@final
class Holder:
    """A replica as the table knows it; a forgotten one stays in the table until its keys are looked up.

    Args:
        pool_tokens: of its pools together.

    Attributes:
        forgotten: whether what it held is lost.
    """

    __slots__ = ("_held", "_num_tokens", "_pool_tokens", "forgotten", "name")

    def __init__(self, name: str, pool_tokens: float = inf) -> None:
        self.name, self.forgotten = name, False
        self._pool_tokens, self._num_tokens = pool_tokens, 0
        self._held: dict[TenantKey, int] = {}  # tokens that count, the last used keys last

    def hold(self, keys: Sequence[TenantKey], num_tokens: int) -> Iterator[TenantKey]:
        """Note a context that has been used. Its tokens count once.

        Yields:
            The keys of the least recently used contexts, for which the pools have no room any more.
        """
        for place, key in enumerate(keys):
            self.lose(key)
            self._held[key] = 0 if place else num_tokens
            self._num_tokens += self._held[key]
        while self._held and (self._num_tokens > self._pool_tokens or len(self._held) > MOST_CONTEXTS):
            oldest = next(iter(self._held))
            self.lose(oldest)
            yield oldest

    def lose(self, key: TenantKey) -> None:
        """Note that a context is not held any more, or is the beginning of another one."""
        self._num_tokens -= self._held.pop(key, 0)


@final
class KnownPrefix:
    """A key's tokens and replicas.

    Attributes:
        tokens: of the context that the key stands for.
        shared: whether prompts that differ behind it have been seen.
        next_key: the key of the next message, in the first prompt that went on; None until one has.
    """

    __slots__ = ("_holders", "next_key", "shared", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.shared = False
        self.next_key: bytes | None = None
        self._holders: tuple[Holder, ...] = ()

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Replicas that hold the context; the forgotten ones are left out for good."""
        self._holders = tuple([holder for holder in self._holders if not holder.forgotten])
        return self._holders

    def add(self, holder: Holder) -> None:
        """Note that a replica holds the context."""
        if holder not in self._holders:
            self._holders = (*self.holders, holder)

    def drop(self, holder: Holder) -> None:
        """Note that a replica holds the context no more."""
        self._holders = tuple([other for other in self._holders if other is not holder])

    def move_to(self, holder: Holder) -> None:
        """Note that this replica alone holds the context."""
        self._holders = (holder,)

    def forks_at(self, next_key: bytes | None) -> bool:
        """Whether prompts differ behind this one, one of which goes on with this key (None: it ends here)."""
        return self.shared or (next_key is not None and self.next_key not in (None, next_key))


@final
class KnownPrefixes:
    """Keys by tenant, at most so many of them together.

    Args:
        most: keys of all tenants together, at least 1. A key takes about 470 bytes.
    """

    def __init__(self, most: int) -> None:
        self._quota = Quota[TenantKey](most)
        self._prefixes: dict[TenantKey, KnownPrefix] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def get(self, tenant: str, key: bytes) -> KnownPrefix | None:
        """The entry of a key; None if there is none. Leaves the order of use as it is."""
        return self._prefixes.get((tenant, key))

    def touch(self, tenant: str, key: bytes, tokens: int) -> KnownPrefix:
        """The entry of a key, which becomes the tenant's youngest; a new one if there was none."""
        name = tenant, key
        if (prefix := self._prefixes.get(name)) is None:
            prefix = self._prefixes[name] = KnownPrefix(tokens)
        self._quota.add(tenant, name)
        while (oldest := self._quota.victim(tenant)) is not None:
            self._quota.remove(oldest[0], oldest)
            del self._prefixes[oldest]
        return prefix
