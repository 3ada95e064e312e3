"""What shapes a request's draws besides temperature, seed and position. Plain values: the arrays are the runner's."""

from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The part of a request's parameters that changes or reports its draws.

    Attributes:
        params: of the request.
        end_token_ids: what may not be drawn before `min_tokens`.
        remembered: the device keeps something of the request by its slot: what it said, what it may say.
    """

    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    remembered: bool = False


class TokenHistory(NamedTuple):
    """A sequence when it gets a slot of the device.

    Attributes:
        tokens: all of them.
        external_spans: ranges, in order, that the model did not generate: the prompt, results of tools.
    """

    tokens: tuple[int, ...]
    external_spans: tuple[tuple[int, int], ...]


def draw_options(params: SamplingParams, end_token_ids: frozenset[int]) -> DrawOptions | None:
    """What a request asks for besides a temperature; None if that is all.

    Args:
        end_token_ids: tokens that would end the request.
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    remembered = bool(
        penalties or params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens
    )
    filtered = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    if not remembered and not filtered and params.logprobs is None:
        return None
    held = tuple(sorted(end_token_ids)) if params.min_tokens else ()
    return DrawOptions(params, held, remembered)
