"""Checks of prepared requests before they are submitted, so that a refusal names the field of the body."""

from collections.abc import Sequence

from jinfercept.engine.admission import check_request
from jinfercept.errors import RequestError
from jinfercept.protocols.errors import ApiError
from jinfercept.request import Request
from jinfercept.server.service import Service


def check_requests(service: Service, requests: Sequence[Request], param: str) -> None:
    """Raise 400 for requests that the engine refuses, for example for a prompt that leaves no room for an answer.

    Args:
        param: field of the prompts.
    """
    for request in requests:
        check_length(service, len(request.prompt_token_ids), param)
        try:
            check_request(request, service.llm.model.config.vocab_size, service.max_model_len)
        except RequestError as error:
            raise ApiError.of(error, param) from error


def check_length(service: Service, num_tokens: int, param: str) -> None:
    """Raise 400 for a number of prompt tokens that leaves no room for an answer."""
    if num_tokens >= service.max_model_len:
        message = f"the prompt has {num_tokens} tokens; with its answer it may have {service.max_model_len}"
        raise ApiError.bad(message, param, "context_length_exceeded")
