"""Checks of a user's own code: policies and orders on engines without a model and JAX, and a trainer's forward pass beside an
engine."""

from importlib import import_module
from typing import TYPE_CHECKING

from jinfercept.sim.policy_check import PolicyCheckError as PolicyCheckError
from jinfercept.sim.policy_check import check_policy as check_policy

if TYPE_CHECKING:
    from jinfercept.logprob_check import LogprobReport as LogprobReport
    from jinfercept.logprob_check import check_logprobs as check_logprobs
    from jinfercept.logprob_check import forward_logits as forward_logits
    from jinfercept.logprob_check import forward_logprobs as forward_logprobs

_WITH_JAX = ("LogprobReport", "check_logprobs", "forward_logits", "forward_logprobs")


def __getattr__(name: str) -> object:
    if name not in _WITH_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("jinfercept.logprob_check"), name)
