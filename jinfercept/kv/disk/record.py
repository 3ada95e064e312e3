"""Records: runs of pages on disk, as a tree in which a record continues another behind one of its pages.

Records that continue one behind the same page begin with different pages. A record is named by the SHA-256 of its root's digest
and all tokens from the first to its own last one. In the order of last use a record comes before what it continues, so that the
first one is of use to no other.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, final

from jinfercept.kv.extent import common_pages


class Root(NamedTuple):
    """What contexts have in common that may share pages.

    Attributes:
        digest: of the model, its weights, the dtype and layout of KV, and the isolation salt.
        token_bytes: bytes of a page's tokens.
        kv_bytes: bytes of a page's KV.
    """

    digest: bytes
    token_bytes: int
    kv_bytes: int


class RecordData(NamedTuple):
    """Where the pages of a record are: the name of their file, and a CRC of each."""

    file: str
    checksums: "array[int]"


NO_DATA = RecordData("", array("I"))
"""The data of a root, and of records that have none."""


@final
class Record:
    """A run of pages and what continues it; mutable.

    Args:
        parent: what it continues; None for a root, which has no pages.
        start: pages of the parent before it.

    Attributes:
        root: what it belongs to.
        tokens: of its pages.
        data: where its pages are.
        children: what continues it, by `start` and the tokens of their first page.
        pins: readers and writers, during which its file stays.
        is_gone: it is no longer in the tree.
    """

    __slots__ = ("_before", "children", "data", "is_gone", "parent", "pins", "root", "start", "tokens")

    def __init__(
        self,
        root: Root,
        parent: "Record | None" = None,
        start: int = 0,
        tokens: bytes = b"",
        data: RecordData = NO_DATA,
    ) -> None:
        self.root, self.parent, self.start, self.tokens, self.data = root, parent, start, tokens, data
        self._before = hashlib.sha256(root.digest) if parent is None else parent._digest_of(start)
        self.pins = 0
        self.children: dict[tuple[int, bytes], Record] = {}
        self.is_gone = False

    def _digest_of(self, num_pages: int) -> Any:
        """A SHA-256 of everything up to the end of so many of its pages, which may be continued."""
        state = self._before.copy()
        state.update(self.tokens[: num_pages * self.root.token_bytes])
        return state

    @property
    def num_pages(self) -> int:
        return len(self.tokens) // self.root.token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its pages."""
        return self.num_pages * self.root.kv_bytes

    @property
    def key(self) -> tuple[int, bytes]:
        """By which its parent has it."""
        return self.start, self.tokens[: self.root.token_bytes]

    @property
    def name(self) -> bytes:
        """Digest of everything up to its end."""
        return self._digest_of(self.num_pages).digest()


class Match(NamedTuple):
    """The longest stored prefix of some tokens.

    Attributes:
        root: the record of their root.
        parts: records from there on, each with the number of its leading pages that belong to the prefix.
        num_pages: pages of all.
    """

    root: Record
    parts: tuple[tuple[Record, int], ...]
    num_pages: int

    def pin(self, count: int) -> None:
        """Add to the pins of the records."""
        for record, _ in self.parts:
            record.pins += count

    def spans(self, first: int, count: int) -> Iterator[tuple[Record, range]]:
        """Where so many pages are, from number `first` on: records, and the numbers of the pages in them."""
        for record, num_pages in self.parts:
            within = range(first, min(num_pages, first + count))
            if within:
                yield record, within
            count -= len(within)
            first = max(0, first - num_pages)

    def continued(self, tokens: bytes, data: RecordData) -> Record:
        """A record for the pages of these tokens that the prefix lacks, not yet in the tree."""
        parent, start = self.parts[-1] if self.parts else (self.root, 0)
        root = self.root.root
        return Record(root, parent, start, tokens[self.num_pages * root.token_bytes :], data)


class StoredRecord(NamedTuple):
    """What the file of a record says about it.

    Attributes:
        parent: name of the record that it continues; empty if it continues a root.
        start: pages of the parent before it.
        used_s: Unix time of its last use.
    """

    root: Root
    parent: bytes
    start: int
    tokens: bytes
    data: RecordData
    used_s: float


@final
class Tree:
    """All records of a disk tier in memory: by root and tokens, and in the order of their last use."""

    def __init__(self) -> None:
        self._roots: dict[Root, Record] = {}
        self._order: OrderedDict[Record, None] = OrderedDict()

    @property
    def records(self) -> Collection[Record]:
        """All records but the roots, in the order of their last use."""
        return self._order.keys()

    def load(self, stored: Iterable[StoredRecord]) -> None:
        """Fill an empty tree with the records whose beginnings are stored, too."""
        by_parent: dict[tuple[Root, bytes], list[StoredRecord]] = {}
        for each in stored:
            by_parent.setdefault((each.root, each.parent), []).append(each)
        used: dict[Record, float] = {}
        waiting = [(self._root(root), group) for (root, name), group in by_parent.items() if not name]
        while waiting:
            parent, group = waiting.pop()
            for each in group:
                record = Record(each.root, parent, each.start, each.tokens, each.data)
                fits = 1 <= each.start <= parent.num_pages or (parent.parent is None and not each.start)
                if fits and parent.children.setdefault(record.key, record) is record:
                    used[record] = each.used_s
                    waiting.append((record, by_parent.get((each.root, record.name), [])))
        for record in reversed(used):  # what continues a record comes before it
            if record.parent in used:
                used[record.parent] = max(used[record.parent], used[record])
        latest_first = sorted(used, key=lambda record: used[record], reverse=True)  # of equals a parent comes first
        self._order.update((record, None) for record in reversed(latest_first))

    def _root(self, root: Root) -> Record:
        return self._roots.get(root) or self._roots.setdefault(root, Record(root))

    def match(self, root: Root, tokens: bytes) -> Match:
        """The longest stored prefix of these tokens."""
        unit, record, alike, num_pages, parts = root.token_bytes, self._root(root), 0, 0, list[tuple[Record, int]]()
        top = record
        while child := record.children.get((alike, tokens[num_pages * unit : (num_pages + 1) * unit])):
            record, alike = child, common_pages(child.tokens, tokens, num_pages * unit, unit)
            parts.append((record, alike))
            num_pages += alike
        return Match(top, tuple(parts), num_pages)

    def use(self, match: Match) -> None:
        """Note a use of the records of a prefix."""
        for record, _ in reversed(match.parts):
            if not record.is_gone:
                self._order.move_to_end(record)

    def insert(self, record: Record, match: Match) -> None:
        """Take in a record that is used now and continues a prefix."""
        assert record.parent is not None
        record.parent.children[record.key] = record
        self._order[record] = None
        self.use(match)

    def remove(self, record: Record) -> list[Record]:
        """Take out a record and all that continues it; returns these."""
        if record.is_gone or record.parent is None:
            return []
        del record.parent.children[record.key]
        removed = [record]
        for gone in removed:
            removed += gone.children.values()
            gone.is_gone = True
            del self._order[gone]
        return removed

    def least_used(self) -> Record | None:
        """The record whose last use is longest ago, of those that nothing continues and that have no pins."""
        return next((record for record in self._order if not record.children and not record.pins), None)

    def check(self) -> None:
        """Assert that records and what continues them agree, and that a record comes before what it continues."""
        place = {record: number for number, record in enumerate(self._order)}
        for record, number in place.items():
            parent = record.parent
            assert parent is not None
            assert parent.children[record.key] is record, "not a child of its parent"
            assert parent.parent is None or number < place[parent], "used after what it continues"
            assert record.num_pages > 0
