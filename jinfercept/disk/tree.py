"""All records of a disk tier in memory: by root and tokens, and in the order of their last use.

In that order a record comes before what it continues, so that the first one is of use to no other.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, final

from jinfercept.disk.index import IndexRow
from jinfercept.disk.record import Match, Record, RecordData, Root, Split, continued, match, root_record, split


class Insertion(NamedTuple):
    """A record that continues what is stored, before it is in the tree.

    Attributes:
        heads: others that are new: its root, and the head of a record that is cut where it branches off.
        halves: of that record; None: none is cut.
        path: from the root to the record's parent.
    """

    record: Record
    heads: tuple[Record, ...]
    halves: Split | None
    path: tuple[Record, ...]

    @property
    def added(self) -> tuple[Record, ...]:
        """Records that are new to the index, each after its parent."""
        return *self.heads, self.record

    @property
    def changed(self) -> tuple[Record, ...]:
        """Records of which the index has another version."""
        return () if self.halves is None else (self.halves.rest,)


def continue_match(match: Match, tokens: bytes, extent: RecordData) -> Insertion:
    """A record for the pages of these tokens that a match lacks."""
    last = match.path[-1]
    halves = split(last, match.last_pages) if match.last_pages < last.num_pages else None
    parent = last if halves is None else halves.head
    record = continued(parent, tokens[match.num_pages * last.root.token_bytes :], extent)
    roots = () if match.path[0].id else (match.path[0],)
    heads = roots if halves is None else (*roots, halves.head)
    return Insertion(record, heads, halves, (*match.path[:-1], parent))


@final
class Tree:
    """The records.

    Attributes:
        used: times of last use that the index has not got yet, by row.
    """

    def __init__(self) -> None:
        self._roots: dict[Root, Record] = {}
        self._order: OrderedDict[Record, None] = OrderedDict()
        self.used: dict[int, float] = {}

    @property
    def records(self) -> Collection[Record]:
        """All records but the roots, in the order of their last use."""
        return self._order.keys()

    def load(self, rows: Iterable[IndexRow], claim: Callable[[Root, RecordData, int], bool]) -> list[int]:
        """Fill an empty tree with the rows that are named after their tokens and continue each other.

        Args:
            claim: takes the blocks of an extent of so many pages; False if they cannot be its own.

        Returns:
            The rows that are of no use.
        """
        by_parent: dict[int | None, list[IndexRow]] = {}
        useless: set[int] = set()
        for row in rows:
            by_parent.setdefault(row.parent, []).append(row)
            useless.add(row.id)
        used: dict[Record, float] = {}
        waiting: list[tuple[Record, Sequence[IndexRow]]] = []
        for row in by_parent.get(None, ()):
            record = root_record(row.root)
            children = by_parent.get(row.id, ())
            if record.name == row.name and not row.tokens and children and row.root not in self._roots:
                record.id, self._roots[row.root] = row.id, record
                useless.discard(row.id)
                waiting.append((record, children))
        while waiting:
            parent, children = waiting.pop()
            for row in children:
                record = continued(parent, row.tokens, row.extent)
                count, odd = divmod(len(row.tokens), parent.root.token_bytes)
                fits = count == len(row.extent.checksums) > 0 and not odd and row.root == parent.root
                is_new = record.first_page not in parent.children
                if fits and is_new and record.name == row.name and claim(row.root, row.extent, count):
                    record.id = row.id
                    record.attach()
                    useless.discard(row.id)
                    used[record] = row.used
                    waiting.append((record, by_parent.get(row.id, ())))
        for record in reversed(used):  # what continues a record comes before it
            if record.parent in used:
                used[record.parent] = max(used[record.parent], used[record])
        latest_first = sorted(used, key=lambda record: used[record], reverse=True)  # of equals a parent comes first
        self._order.update((record, None) for record in reversed(latest_first))
        return sorted(useless)

    def match(self, root: Root, tokens: bytes) -> Match:
        """The longest stored prefix of these tokens."""
        record = self._roots.get(root)
        return match(record or root_record(root), tokens)

    def use(self, path: Sequence[Record], now_s: float) -> None:
        """Note a use of records, from a root on."""
        for record in reversed(path):
            if record in self._order:
                self._order.move_to_end(record)
                self.used[record.id] = now_s

    def insert(self, insertion: Insertion, now_s: float) -> None:
        """Take in a record that is used now."""
        if insertion.halves is not None:
            insertion.halves.apply()
        insertion.record.attach()
        for record in insertion.added:
            if record.parent is None:
                self._roots[record.root] = record
            else:
                self._order[record] = None
        self.use((*insertion.path, insertion.record), now_s)

    def remove(self, record: Record) -> list[Record]:
        """Take out a record and all that continues it; returns these."""
        if record.is_gone or record.parent is None:
            return []
        del record.parent.children[record.first_page]
        removed = [record]
        for gone in removed:
            removed += gone.children.values()
            gone.is_gone = True
            self._order.pop(gone, None)
            self.used.pop(gone.id, None)
        return removed

    def least_used(self) -> Record | None:
        """The record whose last use is longest ago, of those that nothing continues and that have no pins."""
        return next((record for record in self._order if not record.children and not record.pins), None)

    def take_times(self) -> dict[int, float]:
        """The times of last use that the index has not got yet; they are its own from now on."""
        times, self.used = self.used, {}
        return times

    def check(self) -> None:
        """Assert that records and what continues them agree, and that a record comes before what it continues."""
        place = {record: number for number, record in enumerate(self._order)}
        for record, number in place.items():
            parent = record.parent
            assert parent is not None
            assert parent.children[record.first_page] is record, "not a child of its parent"
            assert parent.parent is None or number < place[parent], "used after what it continues"
            assert len(record.extent.checksums) == record.num_pages > 0
