"""The table of keys that a router knows, with the replicas that hold their contexts: bounded, and fair to tenants.

Every tenant has a table of its own in the order of use. While there are too many keys, the tenant that holds the most loses
its oldest ones; one that holds no more than an equal share loses none to others.
"""

from collections.abc import Sequence
from itertools import islice
from typing import final

from jinfercept.fleet.conversations import KeyedPrefix

_EVICTED_AT_ONCE = 256
"""Keys that the largest tenant loses at a time, so that looking for it is rare."""


@final
class Holder:
    """A replica as the table knows it; a forgotten one stays in the table until its keys are looked up.

    Attributes:
        forgotten: whether what it held is lost.
    """

    __slots__ = ("forgotten", "name")

    def __init__(self, name: str) -> None:
        self.name, self.forgotten = name, False


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
        most: keys of all tenants together, at least 1. A key takes about 350 bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._tables: dict[str, dict[bytes, KnownPrefix]] = {}

    def __len__(self) -> int:
        return self._count

    def get(self, tenant: str, key: bytes) -> KnownPrefix | None:
        """The entry of a key; None if there is none. Leaves the order of use as it is."""
        table = self._tables.get(tenant)
        return None if table is None else table.get(key)

    def lookup(self, tenant: str, prefixes: Sequence[KeyedPrefix]) -> list[tuple[int, KnownPrefix]]:
        """Finds the prefixes of a prompt that are known, with their places."""
        table = self._tables.get(tenant, {})
        return [(place, table[prefix[0]]) for place, prefix in enumerate(prefixes) if prefix[0] in table]

    def touch(self, tenant: str, key: bytes, tokens: int) -> KnownPrefix:
        """The entry of a key, which becomes the tenant's youngest; a new one if there was none."""
        table = self._tables.get(tenant)
        if table is None:
            table = self._tables[tenant] = {}
        prefix = table.pop(key, None)
        if prefix is None:
            prefix = KnownPrefix(tokens)
            self._count += 1
        table[key] = prefix
        if self._count > self._most:  # a tenant over its share makes room for its own key, else the largest does
            share = self._most / len(self._tables)
            if len(table) > share:
                self._drop_oldest(tenant, 1)
            else:
                largest = max(self._tables, key=lambda name: len(self._tables[name]))
                over = len(self._tables[largest]) - int(share)
                self._drop_oldest(largest, max(1, min(over, _EVICTED_AT_ONCE)))
        return prefix

    def _drop_oldest(self, tenant: str, count: int) -> None:
        table = self._tables[tenant]
        for key in list(islice(table, count)):
            del table[key]
            self._count -= 1
        if not table:
            del self._tables[tenant]
