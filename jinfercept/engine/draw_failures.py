"""Draws that gave no token, and reports that are no numbers: what the request's error says."""

import math
from collections.abc import Iterable

from jinfercept.errors import describe_failure
from jinfercept.request import Adapter
from jinfercept.sched.plan import NOTHING_ALLOWED, TokenLogprobs

_NOT_FINITE = describe_failure(
    FloatingPointError(
        "the model's logits are NaN or infinite; fix: look for such numbers in the weights, or for activations that overflow "
        'their type (dtype="float32" helps)'
    )
)
_ADAPTER = (
    "the model's logits with the adapter {!r} are NaN or infinite; fix: if the model answers without it, unload it and train "
    'it again, for activations overflow their type (dtype="float32" helps)'
)
_NOTHING_ALLOWED = describe_failure(
    FloatingPointError(
        "every logit is minus infinity, so that no token can be drawn; fix: look at what the model, the grammar and "
        "allowed_token_ids rule out together"
    )
)


def draw_failure(token: int, report: TokenLogprobs | None, adapter: Adapter | None) -> str | None:
    """Why a sampled row gives no token; None if it gives one.

    Args:
        token: of the row, see `StepResult`.
        report: of the row, if the request asks for one.
        adapter: of the request.
    """
    if token == NOTHING_ALLOWED:
        return _NOTHING_ALLOWED
    return _not_finite(adapter) if token < 0 or (report is not None and math.isnan(report.logprob)) else None


def score_failure(scores: Iterable[TokenLogprobs], adapter: Adapter | None) -> str | None:
    """Why tokens of a prompt have no log probabilities; None if they have."""
    return _not_finite(adapter) if any(math.isnan(score.logprob) for score in scores) else None


def _not_finite(adapter: Adapter | None) -> str:
    return _NOT_FINITE if adapter is None else describe_failure(FloatingPointError(_ADAPTER.format(adapter.name)))
