"""The state that a context has in recurrent layers, see `states.py`."""

from array import array
from typing import final

from jinfercept.kv.pool import Slots


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
