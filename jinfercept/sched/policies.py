"""The policies by name, and the making of each from a profile and an estimator."""

from collections.abc import Callable
from typing import NamedTuple

from jinfercept.sched.estimator import ElapsedEstimator, Estimator
from jinfercept.sched.lru import CopyAhead, LeastRecentlyUsed
from jinfercept.sched.min_waste import Keep, MinWaste, keep_if_cheaper, keep_none, keep_short_kinds
from jinfercept.sched.named_profiles import GPTJ_6B
from jinfercept.sched.plugins import make_choice
from jinfercept.sched.policy import AtPause, Policy, discard, improved_discard, preserve, swap
from jinfercept.sched.profile import CostModel


class PolicyInputs(NamedTuple):
    """The inputs of a policy: prices of the machine, and durations of interceptions."""

    cost: CostModel
    saturation: int  # S, the query tokens after which a step grows longer
    page_size: int  # tokens per page
    estimator: Estimator

    def forward_s(self, query_tokens: int) -> float:
        """T_fwd of the paper: seconds of a step, without the reading of contexts."""
        return self.cost.step_s(query_tokens, 0)

    def make(self, choice: "PolicyChoice") -> Policy:
        """Make a policy; one that is not built in is guarded. Raises `ConfigError` as `check_choice`."""
        return make_choice("policy", choice, SETTINGS, Policy, BUILT_IN, self)


PUBLISHED = PolicyInputs(GPTJ_6B, GPTJ_6B.saturation, 16, ElapsedEstimator())
"""Published prices, on which a class is tried."""

type PolicyChoice = str | Policy | type[Policy] | Callable[[PolicyInputs], Policy] | Callable[[], Policy]
"""A name of `SETTINGS`; a place, `path.py:Class` or `package.module:Class`; a class or a function, called once for every
engine, with the `PolicyInputs` if it requires an argument; or a policy, for one engine."""


def check_choice(choice: PolicyChoice | None) -> None:
    """Raise `ConfigError` unless a policy can be made of a choice, or it is None. A class is tried on published prices."""
    if choice is None:
        return
    PUBLISHED.make(choice)


def _min_waste(inputs: PolicyInputs, keep: Keep = keep_if_cheaper) -> Policy:
    link_tokens_per_s = inputs.cost.link_tokens(1.0)
    return MinWaste(inputs.estimator, inputs.forward_s, inputs.saturation, inputs.page_size, link_tokens_per_s, keep)


BUILT_IN = (AtPause, MinWaste, LeastRecentlyUsed, CopyAhead)
"""The classes of built-in policies, which run without a guard."""

SETTINGS: dict[str, Callable[[PolicyInputs], Policy]] = {
    "discard": lambda inputs: discard(),
    "improved_discard": lambda inputs: improved_discard(),
    "preserve": lambda inputs: preserve(),
    "swap": lambda inputs: swap(),
    "chunked_discard": lambda inputs: improved_discard(),
    "budgeted_swap": lambda inputs: _min_waste(inputs, keep_none),
    "heuristic_preserve": lambda inputs: _min_waste(inputs, keep_short_kinds),
    "min_waste": _min_waste,
    "lru": lambda inputs: LeastRecentlyUsed(writes_through=False),
    "lru_host": lambda inputs: LeastRecentlyUsed(writes_through=True),
    "copy_ahead": lambda inputs: CopyAhead(),
}
"""The policies by name. The paper's ablation is discard, improved_discard, chunked_discard, budgeted_swap, heuristic_preserve
and min_waste, in this order."""

WHOLE_PROMPTS = ("discard", "improved_discard", "preserve", "swap")
"""The policies whose published form computes whole prompts before any sequence decodes, as vLLM did when InferCept was
written. The others chunk prefill."""
