"""The experts of tokens in answers, and the limits on asking for them."""

import base64
import io
from typing import Any

import numpy as np

from jinfercept.protocols.errors import ApiError

FIELD = "return_routed_experts"
_ENTRY_BYTES = 64


def check_experts(has_experts: bool, returns_experts: bool, stream: bool | None) -> None:
    """Raise 400 for a body with `return_routed_experts` that cannot be answered.

    Args:
        has_experts: whether the model has some.
        returns_experts: whether the engine was started to return them.
        stream: of the body.
    """
    if not has_experts:
        raise ApiError.bad("the model has no experts; fix: leave return_routed_experts out", FIELD)
    if not returns_experts:
        raise ApiError.bad("the server returns no experts; fix: start it with --enable-return-routed-experts", FIELD)
    if stream:
        raise ApiError.bad("return_routed_experts cannot be streamed; fix: stream false", FIELD)


def num_entries(num_bytes: int) -> int:
    """The entries of log probabilities that take as long an answer as the experts of so many bytes."""
    return num_bytes // _ENTRY_BYTES


def encoded_experts(experts: Any) -> str | None:
    """The field `routed_experts` as vLLM has it: the bytes of a `.npy` file in base64; None if there are none.

    Args:
        experts: of a `CompletionOutput`, an int16 array `[tokens, layers, experts]`.
    """
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
