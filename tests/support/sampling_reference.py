"""What sampling parameters mean, token by token in plain numpy: no words, no slots, no bisection."""

from collections.abc import Sequence

import numpy as np

from jinfercept.sampling_params import SamplingParams


def shaped(
    logits: np.ndarray,
    params: SamplingParams,
    given: Sequence[int],
    output: Sequence[int],
    *,
    recent: Sequence[int] = (),
    ends: Sequence[int] = (),
    mask: Sequence[int] | None = None,
) -> np.ndarray:
    """Logits before the temperature.

    Args:
        logits: `[V]`.
        given: tokens of the prompt and of results.
        output: generated tokens.
        recent: those of them after which nothing was given.
        ends: tokens that would end the request.
        mask: what a grammar allows.
    """
    logits = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*given, *output}:
        logits[token] *= params.repetition_penalty if logits[token] <= 0 else 1 / params.repetition_penalty
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    allowed = set(range(len(logits))) if mask is None else set(mask)
    if params.allowed_token_ids:
        allowed &= set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        allowed -= set(ends)
    for *before, last in params.bad_words_token_ids or ():
        if not before or list(recent[-len(before) :]) == before:
            allowed.discard(last)
    assert allowed
    forbidden = [token for token in range(len(logits)) if token not in allowed]
    logits[forbidden] = -np.inf
    return logits


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """With what probability every token is drawn from shaped logits; 0 where it is filtered out."""
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p * (1 - 1e-7)] = 0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[-min(params.top_k, len(weights))]] = 0
    total, kept = 0.0, []
    for token in np.argsort(-weights):
        if kept and total >= params.top_p * weights.sum() and weights[token] < weights[kept[-1]]:
            break
        total += weights[token]
        kept.append(token)
    drawn = np.zeros_like(weights)
    drawn[kept] = weights[kept] / weights[kept].sum()
    return drawn
