"""Forces any residency mix, page by page."""

from jinfercept.sched.policy import Action, AtPause, Placement, Policy


def scripted(placement: Placement) -> Policy:
    """A policy that puts every page of a paused context where `placement` says; steps wait for the transfers."""
    return AtPause(placement, evict=Action.SWAP, synchronous=True)
