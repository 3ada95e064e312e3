"""Forces any residency mix, page by page."""

from collections.abc import Callable

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import Action, AtPause, Policy
from jinfercept.sched.sequence import Sequence


def scripted(placement: Callable[[Sequence, int], Residency]) -> Policy:
    """A policy that puts every page of a paused context where `placement` says; steps wait for the transfers."""

    def places(sequence: Sequence) -> list[tuple[range, Residency]]:
        indexes = range(sequence.context.num_pages)
        return [(indexes[index : index + 1], placement(sequence, index)) for index in indexes]

    return AtPause(places, evict=Action.SWAP, synchronous=True)
