"""Sampling options besides temperature, random key and position. Plain values: the arrays are the runner's."""

from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The part of a request's parameters that changes or reports its draws.

    Attributes:
        end_token_ids: tokens that may not be drawn before `min_tokens`.
        remembered: the device keeps state by the request's slot: token counts, biases, allowed and bad tokens.
    """

    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    remembered: bool = False

    @property
    def filtered(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` limit the draws."""
        params = self.params
        return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


class TokenHistory(NamedTuple):
    """The tokens of a sequence at the time it gets a slot.

    Attributes:
        tokens: prompt, generated, and results of calls.
        external_spans: ranges that the model did not generate, in order: the prompt, results of calls.
    """

    tokens: tuple[int, ...]
    external_spans: tuple[tuple[int, int], ...]


def draw_options(params: SamplingParams, end_token_ids: frozenset[int]) -> DrawOptions | None:
    """The options of a request; None if it has none besides temperature and random key.

    Args:
        end_token_ids: tokens that would end the request.
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    remembered = bool(
        penalties or params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens
    )
    options = DrawOptions(params, tuple(sorted(end_token_ids)) if params.min_tokens else (), remembered)
    needed = remembered or options.filtered or params.reports_draws or params.forced_output_ids
    return options if needed else None
