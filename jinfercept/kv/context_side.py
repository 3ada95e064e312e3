"""What a context has beside its pages: its pages in layers with windows, see `windows.py`, or its state in recurrent layers,
see `states.py`.
"""

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


@final
class ContextState:
    """The state of one context in the recurrent layers; mutable, written by the `StatePool` alone.

    Attributes:
        slot: device slot that the context alone has, in which its state is and which its next chunk writes; 0: there is none.
        source: device slot that others have, too, from which its next chunk begins; 0: there is none.
        host: slot of the host copy; -1: there is none.
        position: leading tokens that the state and its copy have seen, behind the plan being built.
        fetching: the plan being built brings the state to the device: it is readable from the next plan on.
        offloading: the plan being built copies the state to the host.
        branch: index behind the last page that others have too, where they have no checkpoint; 0: there is none.
    """

    __slots__ = ("branch", "fetching", "host", "offloading", "position", "slot", "source")

    def __init__(self) -> None:
        self.slot = self.source = self.position = self.branch = 0
        self.host = -1
        self.fetching = self.offloading = False

    @property
    def slots(self) -> Slots:
        """The device slot where the state is; none if it is not on the device."""
        slot = self.source or self.slot
        return array("i", (slot,) if slot else ())

    @property
    def has_host(self) -> bool:
        """Whether there is a host copy."""
        return self.host >= 0

    def append(self, index: int) -> bool:
        """Note that the plan being built computes the next token; False if that takes another slot or ends a copy."""
        if not self.slot or self.source or self.host >= 0:
            return False
        self.position += (
            1  # the pool does not note the slot as written: a sequence that a plan computes is not preempted in it
        )
        return True
