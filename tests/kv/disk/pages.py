"""Pages whose KV are a digest of their tokens and all before them, and a model that says which a store may give."""

import hashlib
from collections.abc import Sequence

from jinfercept.kv.disk import DiskStore, Root

TOKEN_BYTES = 4
PAGE_BYTES = 5000
ROOT = Root(b"one model", TOKEN_BYTES)


def tokens_of(pages: Sequence[int]) -> bytes:
    """The tokens of pages that are named by a number each."""
    return b"".join(page.to_bytes(TOKEN_BYTES) for page in pages)


def kv_of(tokens: bytes, root: Root = ROOT) -> list[bytes]:
    """The KV of every page of these tokens."""
    ends = range(TOKEN_BYTES, len(tokens) + 1, TOKEN_BYTES)
    digests = [hashlib.sha256(root.digest + tokens[:end]).digest() for end in ends]
    return [(digest * (PAGE_BYTES // 32 + 1))[:PAGE_BYTES] for digest in digests]


def write_pages(store: DiskStore, tokens: bytes, first: int = 0, root: Root = ROOT) -> int:
    """Store the pages of these tokens from a number on, each as two pieces."""
    pages = kv_of(tokens, root)[first:]
    return store.write(root, tokens, first, [(memoryview(page)[:100], memoryview(page)[100:]) for page in pages])


def read_pages(store: DiskStore, tokens: bytes, root: Root = ROOT) -> int:
    """How many leading pages of these tokens the store gives; all of them are right."""
    names = store.find(root, tokens)
    buffers = [bytearray(PAGE_BYTES) for _ in names]
    num_right = store.read(names, [(memoryview(buffer),) for buffer in buffers])
    assert buffers[:num_right] == kv_of(tokens, root)[:num_right]
    return num_right


def abandon(store: DiskStore) -> None:
    """End a store as a kill does: what it has not written stays unwritten."""
    store.problem = "killed"
    store._end()
