"""The KV unit: a run of `page_size` tokens over all layers, with up to two places.

    =============  ====================  ============
    .              host copy up to date  no host copy
    =============  ====================  ============
    on the device  CLEAN                 DIRTY
    not there      HOST                  MISSING
    =============  ====================  ============

A page with a digest holds a full run of accepted tokens, named by the chain of all tokens before it, and may be shared.
A page without one is the private tail of one context.
"""

import hashlib
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Residency(Enum):
    """Where a page's KV is."""

    DIRTY = "dirty"
    CLEAN = "clean"
    HOST = "host"
    MISSING = "missing"

    @property
    def on_device(self) -> bool:
        """Whether the KV is on the device."""
        return self is Residency.DIRTY or self is Residency.CLEAN

    @property
    def on_host(self) -> bool:
        """Whether the host has an up-to-date copy."""
        return self is Residency.HOST or self is Residency.CLEAN


class Page:
    """One page; mutable. Only the `KVManager` and its `PageStore` write to it.

    Attributes:
        digest: of the page's tokens and all tokens before them, once the page is full and its tokens are accepted.
        refs: contexts of running sequences that have the page; it may not be evicted.
        evictable_refs: contexts of waiting and intercepted sequences that have it; it may be evicted.
        device, host: its slots; None where it has none.
        filled, host_filled: tokens whose KV is valid on the device, and on the host.
        fetching: the plan being built fetches it; readable from the next plan on.
        offloading: the plan being built copies it to the host; it can be fetched from the next plan on.
    """

    __slots__ = (
        "device",
        "digest",
        "evictable_refs",
        "fetching",
        "filled",
        "host",
        "host_filled",
        "offloading",
        "refs",
    )

    def __init__(self) -> None:
        self.digest: bytes | None = None
        self.refs = 0
        self.evictable_refs = 0
        self.device: int | None = None
        self.filled = 0
        self.host: int | None = None
        self.host_filled = 0
        self.fetching = False
        self.offloading = False

    @property
    def residency(self) -> Residency:
        """CLEAN only if the host copy holds every token that the device holds."""
        if self.device is None:
            return Residency.MISSING if self.host is None else Residency.HOST
        return Residency.CLEAN if self.host is not None and self.host_filled == self.filled else Residency.DIRTY

    def __repr__(self) -> str:
        name = self.digest.hex()[:8] if self.digest else "tail"
        return (
            f"Page({name} {self.residency.value} device={self.device}:{self.filled} host={self.host}:{self.host_filled} "
            f"refs={self.refs} evictable_refs={self.evictable_refs})"
        )


class PageCopy(NamedTuple):
    """One page to copy between the memories, in either direction.

    Attributes:
        context: on the way to the host, the number of the page's context among those of the plan: pages of one context are
            likely to be fetched together.
    """

    device_slot: int
    host_slot: int
    context: int = 0


class Occupancy(NamedTuple):
    """Pages of both pools by kind. Those of the device add up to `total`.

    Attributes:
        free: device slots without a page.
        used: pages of running contexts.
        paused: pages of paused contexts only.
        cached: pages of finished prefixes.
        total: device slots.
        paused_clean: those of `paused` that have a host copy.
        host: host slots that hold a copy.
        host_total: host slots.
    """

    free: int
    used: int
    paused: int
    cached: int
    total: int
    paused_clean: int = 0
    host: int = 0
    host_total: int = 0


def root_digest(*parts: object) -> bytes:
    """The root of a chain: contexts share pages only under equal roots (model, dtype, page size, isolation salt)."""
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).digest()


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full page: SHA-256 of the parent's name and the page's token ids."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
