"""Records: runs of pages on disk, as a tree in which a record continues its parent's tokens.

Records of one parent begin with different pages. A record is named by the SHA-256 of its root's digest and all tokens from the
first to its own last one, so that the name of a prefix does not depend on how it is cut into records.
"""

import hashlib
import zlib
from array import array
from typing import Any, NamedTuple, final

from jinfercept.disk.blocks import BLOCK_BYTES, BlockRuns, Buffers, cut
from jinfercept.kv.extent import common_pages


class Root(NamedTuple):
    """What contexts have in common that may share pages.

    Attributes:
        digest: of the model, its weights, the dtype and layout of KV, and the isolation salt.
    """

    digest: bytes
    token_bytes: int
    kv_bytes: int

    @property
    def page_blocks(self) -> int:
        return -(-self.kv_bytes // BLOCK_BYTES)


class RecordData(NamedTuple):
    """Where a run of pages lies, and how to know that it is whole.

    Attributes:
        runs: its blocks; every page begins with a block.
        stamp: random, of the write that made it.
        first: number of its first page in that write.
    """

    runs: BlockRuns
    checksums: "array[int]"
    stamp: bytes
    first: int

    def part(self, first: int, count: int, page_blocks: int) -> "RecordData":
        runs = cut(self.runs, first * page_blocks, count * page_blocks)
        return RecordData(runs, self.checksums[first : first + count], self.stamp, self.first + first)

    def checksum(self, page: int, data: Buffers) -> int:
        """Of the bytes of one of its pages: a CRC of the write's stamp, the page's number in that, and these."""
        crc = zlib.crc32(self.stamp + (self.first + page).to_bytes(4))
        for piece in data:
            crc = zlib.crc32(piece, crc)
        return crc


@final
class Record:
    """A run of pages and what continues it; mutable.

    Attributes:
        root: what it belongs to. The record of a root has no pages and no parent.
        parent: what it continues.
        tokens: of its pages.
        extent: where its pages are.
        state: SHA-256 of everything up to its end.
        id: of its row in the index; 0 before it has one.
        children: what continues it, by the tokens of their first page.
        pins: readers and writers, during which its blocks stay.
        is_gone: it is no longer in the tree.
    """

    __slots__ = ("children", "extent", "id", "is_gone", "parent", "pins", "root", "state", "tokens")

    def __init__(self, root: Root, parent: "Record | None", tokens: bytes, extent: RecordData, state: Any) -> None:
        self.root, self.parent, self.tokens, self.extent, self.state = root, parent, tokens, extent, state
        self.id = self.pins = 0
        self.children: dict[bytes, Record] = {}
        self.is_gone = False

    @property
    def num_pages(self) -> int:
        return len(self.tokens) // self.root.token_bytes

    @property
    def first_page(self) -> bytes:
        """Tokens of its first page."""
        return self.tokens[: self.root.token_bytes]

    @property
    def name(self) -> bytes:
        """Digest of everything up to its end."""
        return self.state.digest()

    def attach(self) -> None:
        """Become a child of the parent."""
        if self.parent is not None:
            self.parent.children[self.first_page] = self


NOTHING = RecordData((), array("I"), b"", 0)
"""The extent of a root."""


def root_record(root: Root) -> Record:
    """A root without children."""
    return Record(root, None, b"", NOTHING, hashlib.sha256(root.digest))


def continued(parent: Record, tokens: bytes, extent: RecordData) -> Record:
    """A record that continues another, not yet attached to it."""
    state = parent.state.copy()
    state.update(tokens)
    return Record(parent.root, parent, tokens, extent, state)


class Match(NamedTuple):
    """The longest stored prefix of some tokens.

    Attributes:
        path: its records, from the root on.
        last_pages: pages of the last record that belong to it.
        num_pages: pages of all.
    """

    path: tuple[Record, ...]
    last_pages: int
    num_pages: int


def match(root: Record, tokens: bytes) -> Match:
    """The longest prefix of these tokens that the tree has."""
    unit, path, num_pages, last = root.root.token_bytes, [root], 0, 0
    while (child := path[-1].children.get(tokens[num_pages * unit : (num_pages + 1) * unit])) is not None:
        last = common_pages(child.tokens, tokens, num_pages * unit, unit)
        path.append(child)
        num_pages += last
        if last < child.num_pages:
            break
    return Match(tuple(path), last, num_pages)


class Split(NamedTuple):
    """A record cut in two, before either half is in the tree.

    Attributes:
        head: a new record with its first pages.
        rest: stands for what remains of it: its row, its children and the other pages.
    """

    record: Record
    head: Record
    rest: Record

    def apply(self) -> None:
        """Put both halves into the tree."""
        record, rest = self.record, self.rest
        record.tokens, record.extent, record.parent = rest.tokens, rest.extent, self.head
        self.head.attach()
        record.attach()


def split(record: Record, num_pages: int) -> Split:
    """A record cut behind so many of its pages."""
    assert record.parent is not None
    size, extent, page_blocks = num_pages * record.root.token_bytes, record.extent, record.root.page_blocks
    head = continued(record.parent, record.tokens[:size], extent.part(0, num_pages, page_blocks))
    rest = continued(head, record.tokens[size:], extent.part(num_pages, record.num_pages - num_pages, page_blocks))
    rest.id = record.id
    return Split(record, head, rest)
