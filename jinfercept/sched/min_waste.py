"""InferCept's own policy: each iteration, swap the most wasteful contexts within the free budget, keep or drop the rest.

Where the paper is silent, fetches take the link's budget before swaps, and only tokens that no other request shares count.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy, longest_paused
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.waste import chunk_tokens, chunked_discard_waste, preserve_waste

SHORT_KINDS = frozenset({"math", "qa", "ve"})
"""The short, automated calls of the paper's workload, which its heuristic always preserves."""


class Verdict(NamedTuple):
    """The waste of keeping and of dropping one context from now on, in token·seconds."""

    sequence: Sequence
    preserve: float  # equation (2)
    discard: float  # equation (4)
    tokens: int  # unshared ones on the device, and as many as the context's state takes

    @property
    def least(self) -> float:
        """Equation (5)."""
        return min(self.preserve, self.discard)


Keep = Callable[[Verdict], bool]


def keep_if_cheaper(verdict: Verdict) -> bool:
    """Equation (5): keep a context if that wastes no more than dropping it."""
    return verdict.preserve <= verdict.discard


def keep_short_kinds(verdict: Verdict) -> bool:
    """The paper's heuristic (ablation): keep the context of short automated calls."""
    return all(call.name in SHORT_KINDS for call in verdict.sequence.calls)


def keep_none(verdict: Verdict) -> bool:
    """Drop every context that the link budget does not reach (ablation)."""
    return False


@final
class MinWaste(Policy):
    """The paper's choice, re-evaluated every iteration (InferCept §4.4).

    `forward_s` is T_fwd, seconds of an iteration by its query tokens; `saturation` is S, the query tokens after which it
    grows longer; `page_size` is the least recompute chunk. `keep` says whether a context that the link budget does not reach
    stays on the device.
    """

    def __init__(
        self,
        estimator: Estimator,
        forward_s: Callable[[int], float],
        saturation: int,
        page_size: int,
        link_tokens_per_s: float,
        keep: Keep = keep_if_cheaper,
    ) -> None:
        self._estimator = estimator
        self._forward_s = forward_s
        self._saturation = saturation
        self._page_size = page_size
        self._link_tokens_per_s = link_tokens_per_s
        self._keep = keep
        self._paused: dict[str, Sequence] = {}
        self._hosted: dict[str, Sequence] = {}  # paused, with or without pages on the device
        self._last = Budget(0, 0)

    def pause(self, sequence: Sequence, now: float) -> None:
        self._paused[sequence.id] = self._hosted[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self._paused.pop(sequence.id, None)
        self._hosted.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._last = budget
        verdicts = self._verdicts(now)
        verdicts.sort(key=lambda verdict: -verdict.least)
        link_tokens = budget.link_tokens
        ahead = 0
        for verdict in verdicts:
            sequence = verdict.sequence
            if verdict.least > 0:  # a context of age 0 wastes nothing yet and takes no budget
                for run in sequence.context.runs():
                    pages = run.pages[: max(0, link_tokens) // self._page_size] if run.evictable else range(0)
                    if pages:
                        # A host copy outlives the device page, and the resumption too, but swapping the page out again takes
                        # budget like the first time. The paper frees the copy at swap-in.
                        link_tokens -= len(pages) * self._page_size
                        mover.copy(sequence, "swap within the budget", pages)
                        for copied in sequence.context.runs(pages):
                            if copied.residency.on_host:
                                mover.drop(sequence, "swapped", copied.pages)
            ahead += sum([run.num_tokens for run in sequence.context.runs() if run.evictable])  # on the device still
            if now > sequence.paused_s and not self._keep(self._until_saved(verdict, ahead)):
                mover.drop(sequence, "discard is cheaper")

    def victims(self, now: float) -> Iterator[Move]:
        # the paper says nothing of memory pressure: paused pages go by ascending waste
        verdicts = sorted(self._verdicts(now), key=lambda verdict: verdict.least)
        returned = [sequence for sequence in self._paused.values() if sequence.state is not State.INTERCEPTED]
        returned.sort(key=lambda sequence: -sequence.order)
        for sequence in (*(verdict.sequence for verdict in verdicts), *returned):
            yield Move(sequence, sequence.context.tail_first, Action.DROP, "a slot is needed")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return longest_paused(list(self._hosted.values()), sequence)

    def _until_saved(self, verdict: Verdict, ahead: int) -> Verdict:
        # A correction to the paper: a context that the link will swap for free soon is not dropped now. Keeping is priced
        # until the call returns or the link has moved this context and the more wasteful ones before it, whichever is sooner.
        # With the paper's own estimate this changes next to nothing, since it takes every call for a short one at first. With
        # a better estimate, long calls would otherwise be recomputed more often.
        if not self._link_tokens_per_s:
            return verdict
        until_s = ahead / self._link_tokens_per_s
        return verdict._replace(preserve=min(verdict.preserve, preserve_waste(until_s, verdict.tokens)))

    def _verdicts(self, now: float) -> list[Verdict]:
        """Equations (2) and (4) for the device pages of every intercepted context."""
        chunk = chunk_tokens(self._saturation, self._last.running_queries, self._page_size)
        verdicts = []
        for sequence in list(self._paused.values()):
            resident = [run for run in sequence.context.runs() if run.residency.on_device]
            if not resident:
                del self._paused[sequence.id]  # it wastes nothing until it runs again
                continue
            if sequence.state is not State.INTERCEPTED:
                continue
            tokens = sum([run.num_tokens for run in resident if not run.shared])
            age_s = now - sequence.paused_s
            rest_s = remaining_s(self._estimator, sequence, age_s)
            state = sequence.context.state_tokens
            discard = chunked_discard_waste(tokens, self._last.running_context, chunk, self._forward_s, state)
            verdicts.append(Verdict(sequence, preserve_waste(rest_s, tokens + state), discard, tokens + state))
        return verdicts
