"""The pages that a context has in layers with a sliding window, see `windows.py`."""

from array import array
from typing import final

from jinfercept.kv.pool import Slots

NOT_READ = 1 << 60
"""A position that no plan computes."""


@final
class ContextWindow:
    """The pages of one context in the layers with windows; mutable, written by the `WindowPool` alone.

    Attributes:
        first: index of the first page that has a device slot.
        slots: device slots of that page and the pages behind it, as many as there are.
        host_first, host: likewise the slots of host copies.
        fetching: the plan being built brings the pages to the device: they are readable from the next plan on.
        offloading: the plan being built copies pages to the host.
        read_from: least position whose query the plan being built computes.
        branch: index behind the last page that others have too, where they have no checkpoint; 0: there is none.
    """

    __slots__ = ("branch", "fetching", "first", "host", "host_first", "offloading", "read_from", "slots")

    def __init__(self) -> None:
        self.first = self.host_first = self.branch = 0
        self.slots: Slots = array("i")
        self.host: Slots = array("i")
        self.fetching = self.offloading = False
        self.read_from = NOT_READ

    @property
    def end(self) -> int:
        """Index behind the last page that has a device slot."""
        return self.first + len(self.slots)

    @property
    def host_end(self) -> int:
        """Index behind the last page that has a host copy."""
        return self.host_first + len(self.host)

    @property
    def has_host(self) -> bool:
        """Whether pages have host copies."""
        return bool(self.host)

    def append(self, index: int) -> bool:
        """Whether the next token goes to the page of an index that has a device slot and no copy."""
        return self.host_first + len(self.host) <= index < self.first + len(self.slots)
