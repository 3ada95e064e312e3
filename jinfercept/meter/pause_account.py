"""What one pause of a request cost, as it turned out: memory held, recomputation, stalls. Accounts, and decides nothing.

All in token·seconds of device memory, to be laid beside the waste equations. Only tokens that no other request shares count.
"""

from typing import NamedTuple

from jinfercept.kv.context import Context, Found
from jinfercept.kv.page import Page
from jinfercept.meter.forecast import Forecast
from jinfercept.sched.sequence import Sequence


class Prediction(NamedTuple):
    """What a pause was going to waste in all, in token·seconds, as it looked when it was `age_s` old."""

    age_s: float
    token_s: float


class PauseCost(NamedTuple):
    """What a pause wasted, in token·seconds.

    Attributes:
        held: own tokens on the device, from the pause to the return: what equation (2) predicts.
        recompute: own tokens for the steps that recomputed some of them, others' for what these steps grew by: equation (4).
        fetch: own tokens for the other steps from admission to the next token, which waited for copies from the host. Equation
            (5) counts a swap within the budget as nothing.
        stall: contexts of all who ran, for the seconds that steps waited for this pause's copies: equation (3). These seconds
            are in none of the others.
        queued: own tokens on the device, from the return to admission. No equation knows of it.
    """

    held: float
    recompute: float
    fetch: float
    stall: float
    queued: float

    @property
    def token_s(self) -> float:
        """What the equations are about: without the queue."""
        return self.held + self.recompute + self.fetch + self.stall


class PauseAccount:
    """One pause of one sequence while it is accounted for; mutable, owned by a `DecisionLog`.

    Args:
        sequence: whose.
        number: of its interceptions so far, this one included.
        intercepted: False for a preemption.
        now: when it began.
        page_size: tokens per page.
    """

    __slots__ = (
        "_copied_in",
        "_fetch",
        "_held",
        "_partial",
        "_queued",
        "_recompute",
        "_recomputed",
        "_resident",
        "_since_s",
        "_size",
        "_stall",
        "began_s",
        "call_s",
        "context",
        "forecasts",
        "found",
        "intercepted",
        "number",
        "prediction",
        "recomputed",
        "returned_s",
        "sequence",
        "untouched",
    )

    def __init__(self, sequence: Sequence, number: int, *, intercepted: bool, now: float, page_size: int) -> None:
        self.sequence, self.number, self.intercepted = sequence, number, intercepted
        self.began_s = self._since_s = now
        self._size = page_size
        self._partial = {page: page.filled for page in sequence.context.pages if 0 < page.filled < page_size}
        self.context = self._resident = own_tokens(sequence.context)
        self._held = self._queued = self._recompute = self._fetch = self._stall = 0.0
        self._recomputed, self._copied_in = sequence.recomputed, sequence.copied_in
        self.recomputed = 0  # tokens, until now
        self.untouched = True  # nothing was done to it
        self.returned_s: float | None = None
        self.call_s: float | None = None  # how long its last call lasted, if all ended by themselves
        self.found: Found | None = None  # where its context was when it ran again
        self.prediction: Prediction | None = None
        self.forecasts: list[Forecast] = []

    def tokens(self, page: Page) -> int:
        """What a page of the context holds, if it holds anything."""
        return self._partial.get(page, self._size)

    def settle(self, now: float) -> None:
        """Account for the time until now."""
        held = self._resident * (now - self._since_s)
        self._since_s = now
        if self.returned_s is None:
            self._held += held
        else:
            self._queued += held

    def touch(self, now: float, resident: int) -> None:
        """Something is done to it; it has so many tokens of its own on the device."""
        self.settle(now)
        self._resident = resident
        self.untouched = False

    def lose(self, tokens: int) -> None:
        """So many of its tokens have just left the device; touched before."""
        self._resident = max(0, self._resident - tokens)

    def return_at(self, now: float) -> None:
        """Its calls have returned."""
        self.settle(now)
        self.returned_s = now

    def run_at(self, now: float) -> bool:
        """It runs again; True if it has to recover something first."""
        self.settle(now)
        self._resident = 0
        self.found = residency(self.sequence)
        return self.found.host + self.found.missing > 0

    @property
    def held(self) -> float:
        """Token·seconds that it has held since it began, up to the last settlement."""
        return self._held

    def take_recomputed(self) -> int:
        """Its tokens that were recomputed since the last look."""
        tokens = self.sequence.recomputed - self._recomputed
        self._recomputed = self.sequence.recomputed
        self.recomputed += tokens
        return tokens

    def take_copied_in(self) -> int:
        """Its tokens that were brought from the host since the last look."""
        tokens = self.sequence.copied_in - self._copied_in
        self._copied_in = self.sequence.copied_in
        return tokens

    def pay(self, *, recompute: float = 0.0, fetch: float = 0.0, stall: float = 0.0) -> None:
        """Add what a step cost."""
        self._recompute += recompute
        self._fetch += fetch
        self._stall += stall

    @property
    def outcome(self) -> PauseCost:
        """What it has cost so far."""
        return PauseCost(self._held, self._recompute, self._fetch, self._stall, self._queued)


def own_tokens(context: Context) -> int:
    """Tokens on the device that this context alone has references on: C of the waste equations."""
    return sum([page.filled for page in context.pages if page.refs + page.evictable_refs == 1])


def residency(sequence: Sequence) -> Found:
    """Where the tokens of a sequence that were ever computed are now."""
    device = host = 0
    for page in sequence.context.pages:
        if page.device is not None:
            device += page.filled
        else:
            host += page.host_filled
    return Found(device, host, max(0, sequence.max_computed - device - host))
