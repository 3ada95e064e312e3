"""Refuses requests that could never be served, before they take any memory."""

from math import inf

from jinfercept.errors import RequestError
from jinfercept.request import Request
from jinfercept.sampling_params import check_vocabulary


def check_request(request: Request, vocab_size: int, max_model_len: int, *, returns_experts: bool = True) -> None:
    """Raise `RequestError` if the request can never be served."""
    prompt, limit = request.prompt_token_ids, max_model_len
    if not prompt:
        raise RequestError("a prompt needs at least one token", got="none", fix="give a text or token ids")
    if len(prompt) >= limit:
        raise RequestError(
            f"the prompt leaves no room in the {limit} tokens of a sequence",
            got=f"{len(prompt)} tokens",
            fix="shorten it, or raise max_model_len and kv_tokens",
        )
    are_valid = request.ids_below is not None and request.ids_below <= vocab_size
    wrong = (
        [] if are_valid else [token for token in prompt if not isinstance(token, int) or not 0 <= token < vocab_size]
    )
    if wrong:
        raise RequestError(
            f"token ids are whole numbers from 0 to {vocab_size - 1}", got=wrong[0], fix="check the tokenizer"
        )
    check_vocabulary(request.params, vocab_size)
    if not 0.0 < request.weight < inf:
        raise RequestError("a tenant's weight is a finite number above 0", got=request.weight, fix="1 is the usual one")
    if request.params.return_routed_experts and not returns_experts:
        raise RequestError(
            "the engine does not record which experts computed a token",
            got="return_routed_experts=True",
            fix="start it with enable_return_routed_experts=True",
        )
    if request.params.n > 1:
        raise RequestError("an engine request has one output", got=f"n={request.params.n}", fix="submit forks(request)")
    if request.params.structured_outputs is not None and request.grammar is None:
        raise RequestError("structured outputs need a compiled grammar", got="none", fix="set Request.grammar")
    if request.params.allowed_token_ids is not None and request.grammar is not None:
        raise RequestError(
            "allowed_token_ids cannot be combined with a grammar",
            got=f"{len(request.params.allowed_token_ids)} tokens, and structured_outputs or a tool_choice",
            fix="leave out one of them; a grammar can say which characters may come",
        )
