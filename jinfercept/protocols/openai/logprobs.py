"""Log probabilities in the shapes of chat completions, of text completions, and of vLLM's `prompt_logprobs`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from jinfercept.outputs import Logprob
from jinfercept.protocols.encoding import Lazy
from jinfercept.tokenizer.tokenizer import Tokenizer

_LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

Reported = tuple[int, Mapping[int, Logprob] | None]
"""A token id with the log probabilities of its position by token id; None for a token of a tool's result."""


def chat_logprobs(tokens: Sequence[Reported], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat's choice.

    Args:
        top: number of most likely tokens to report for each.
    """

    def one(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id)
        return {"token": text.decode("utf-8", "replace"), "logprob": _finite(logprob.logprob), "bytes": list(text)}

    return {
        "content": Lazy(
            one(token_id, known[token_id]) | {"top_logprobs": [one(other, known[other]) for other in _best(known, top)]}
            for token_id, known in tokens
            if known is not None
        )
    }


def completion_logprobs(tokens: Sequence[Reported], top: int, tokenizer: Tokenizer, offset: int = 0) -> dict[str, Lazy]:
    """`logprobs` of a completion's choice.

    Args:
        tokens: of the text; the first one of a prompt has no log probabilities.
        top: number of most likely tokens to report for each, besides itself.
        offset: characters of the text before them.
    """

    def texts() -> Iterator[str]:
        return (tokenizer.token_text(token_id) for token_id, _ in tokens)

    return {
        "text_offset": Lazy(islice(accumulate(map(len, texts()), initial=offset), len(tokens))),
        "token_logprobs": Lazy(
            None if known is None else _finite(known[token_id].logprob) for token_id, known in tokens
        ),
        "tokens": Lazy(texts()),
        "top_logprobs": Lazy(
            None
            if known is None
            else {
                tokenizer.token_text(other): _finite(known[other].logprob) for other in [*_best(known, top), token_id]
            }
            for token_id, known in tokens
        ),
    }


def prompt_logprobs(known: Sequence[Mapping[int, Logprob] | None]) -> Lazy:
    """vLLM's `prompt_logprobs`: for every token of the prompt, log probabilities by token id; None for the first one."""
    return Lazy(
        None
        if one is None
        else {
            str(token_id): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in one.items()
        }
        for one in known
    )


def _best(known: Mapping[int, Logprob], top: int) -> list[int]:
    return sorted((token_id for token_id in known if known[token_id].rank <= top), key=lambda one: known[one].rank)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
