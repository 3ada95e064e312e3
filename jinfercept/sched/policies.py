"""The policies by name, and how each is made from a profile and an estimator."""

from collections.abc import Callable
from typing import NamedTuple

from jinfercept.errors import ConfigError, nearest
from jinfercept.sched.conformance import check_shape
from jinfercept.sched.copy_ahead import CopyAhead
from jinfercept.sched.cost import CostModel
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.min_waste import Keep, MinWaste, keep_if_cheaper, keep_none, keep_short_kinds
from jinfercept.sched.policy import Policy, discard, improved_discard, preserve, swap


class PolicyInputs(NamedTuple):
    """The inputs of policies: prices of the machine, and durations of interceptions.

    Attributes:
        cost: prices a step.
        saturation: S, the query tokens after which a step grows longer.
        page_size: tokens per page.
        estimator: predicts durations of interceptions.
    """

    cost: CostModel
    saturation: int
    page_size: int
    estimator: Estimator

    def forward_s(self, query_tokens: int) -> float:
        """T_fwd of the paper: seconds of a step, without the reading of contexts."""
        return self.cost.step_s(query_tokens, 0)

    def make(self, name: str) -> Policy:
        """Make a policy by name. Raises `ConfigError` if none has it."""
        check_name(name)
        return SETTINGS[name].make(self)


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a policy has this name."""
    if name not in SETTINGS:
        fix = f"one of {', '.join(SETTINGS)}"
        raise ConfigError("no such policy", got=name + nearest(name, list(SETTINGS)), fix=fix)


def check_policy(policy: object) -> None:
    """Raise `ConfigError` unless this is None, the name of a policy, or an object with the members of `Policy`."""
    if isinstance(policy, str):
        check_name(policy)
    elif policy is not None:
        check_shape("a policy", policy, Policy)


class PolicyEntry(NamedTuple):
    """A policy that can be selected.

    Attributes:
        make: makes the policy.
        chunked_prefill: whether its published form chunks prefill; False: whole prompts, before any sequence decodes, as vLLM
            did when InferCept was written.
    """

    make: Callable[[PolicyInputs], Policy]
    chunked_prefill: bool = True


def _min_waste(known: PolicyInputs, keep: Keep = keep_if_cheaper) -> Policy:
    link_tokens_per_s = known.cost.link_tokens(1.0)
    return MinWaste(known.estimator, known.forward_s, known.saturation, known.page_size, link_tokens_per_s, keep)


SETTINGS: dict[str, PolicyEntry] = {
    "discard": PolicyEntry(lambda known: discard(), chunked_prefill=False),
    "improved_discard": PolicyEntry(lambda known: improved_discard(), chunked_prefill=False),
    "preserve": PolicyEntry(lambda known: preserve(), chunked_prefill=False),
    "swap": PolicyEntry(lambda known: swap(), chunked_prefill=False),
    "chunked_discard": PolicyEntry(lambda known: improved_discard()),
    "budgeted_swap": PolicyEntry(lambda known: _min_waste(known, keep_none)),
    "heuristic_preserve": PolicyEntry(lambda known: _min_waste(known, keep_short_kinds)),
    "min_waste": PolicyEntry(_min_waste),
    "lru": PolicyEntry(lambda known: LeastRecentlyUsed(writes_through=False)),
    "lru_host": PolicyEntry(lambda known: LeastRecentlyUsed(writes_through=True)),
    "copy_ahead": PolicyEntry(lambda known: CopyAhead(known.estimator)),
}
"""The policies by name. The paper's ablation is discard, improved_discard, chunked_discard, budgeted_swap, heuristic_preserve
and min_waste, in this order."""
