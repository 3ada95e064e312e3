"""Checks code of the user's own: policies and orders on engines without a model and without JAX, and a trainer's forward pass
beside an engine. Knows no HTTP."""

from importlib import import_module
from typing import TYPE_CHECKING

from jinfercept.testing.policy_check import PolicyCheckError as PolicyCheckError
from jinfercept.testing.policy_check import check_policy as check_policy

if TYPE_CHECKING:
    from jinfercept.testing.forward import forward_logits as forward_logits
    from jinfercept.testing.forward import forward_logprobs as forward_logprobs
    from jinfercept.testing.logprob_check import LogprobReport as LogprobReport
    from jinfercept.testing.logprob_check import check_logprobs as check_logprobs

_WITH_JAX = {
    "forward_logits": "forward",
    "forward_logprobs": "forward",
    "LogprobReport": "logprob_check",
    "check_logprobs": "logprob_check",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_JAX[name]}"), name)
