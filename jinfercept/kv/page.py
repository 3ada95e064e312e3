"""The KV unit: a run of `page_size` tokens over all layers, with up to two places.

=============  ====================  ============
.              host copy up to date  no host copy
=============  ====================  ============
on the device  CLEAN                 DIRTY
not there      HOST                  MISSING
=============  ====================  ============
"""

import hashlib
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
    """The name of a tree of extents: contexts share pages only under equal roots (model, dtype, page size, isolation salt)."""
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).digest()
