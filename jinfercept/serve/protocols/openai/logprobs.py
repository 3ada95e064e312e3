"""Log probabilities in the shapes of chat and text completions and of vLLM's `prompt_logprobs`; experts of tokens; limits."""

import base64
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.outputs import Logprob, RequestOutput
from jinfercept.request import Request
from jinfercept.serve.protocols.encoding import Lazy
from jinfercept.serve.protocols.errors import ApiError

MAX_ENTRIES = 2**20
"""Maximum entries of one body, over all prompts and choices. An entry is one log probability: 60 to 120 bytes of an answer."""
SMALL_ENTRIES = 2**14
"""Maximum entries of an answer that is encoded on the event loop, within some milliseconds."""
_CHOICE_ENTRIES = 128
"""Entries that take as long as a choice without any."""
_LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

Reported = tuple[int, Mapping[int, Logprob] | None]
"""A token id with the log probabilities of its position by token id; None for a token of a tool's result."""


def num_reported(tokens: int, best: int | None) -> int:
    """Entries of a report of `best` likely tokens beside each token itself; None: there is no report."""
    return 0 if best is None else tokens * (1 + best)


def check_report(
    requests: Sequence[Request],
    max_model_len: int,
    prompt: Iterable[tuple[str, int | None]],
    answer: tuple[str, int | None],
    *,
    per_choice: bool = False,
    copies: int = 1,
    expert_bytes: int = 0,
) -> None:
    """Raise 400 for more than `MAX_ENTRIES`.

    Args:
        max_model_len: tokens that a prompt and its answer may have together.
        prompt: for each report of the prompt, the field that requests it and its number of best tokens.
        answer: field and number of best tokens of the report of the generated tokens.
        per_choice: whether every choice carries the report of its prompt, or only the first of each prompt.
        copies: number of times that an answer carries the report of a generated token.
        expert_bytes: of each token's experts, if the requests ask for these.
    """
    entries = Counter[str]()
    for request in requests:
        length, most = len(request.prompt_token_ids), request.params.max_tokens
        num_new = min(max_model_len - length, max_model_len if most is None else most)
        entries[answer[0]] += copies * num_reported(num_new, answer[1])
        for field, best in prompt if per_choice or request.leader is None else ():
            entries[field] += num_reported(length, best)
        if request.params.return_routed_experts:
            entries[EXPERTS_FIELD] += (length + num_new) * expert_bytes // _ENTRY_BYTES
    total = entries.total()
    if total > MAX_ENTRIES:
        [(field, _)] = entries.most_common(1)
        raise ApiError.bad(
            f"a body may ask for {MAX_ENTRIES} log probabilities, over all tokens and choices (experts count as log "
            f"probabilities of as many bytes); got {total}, {entries[field]} of them by {field}; fix: less of {field}, "
            "a smaller n or max_tokens, or fewer prompts",
            field,
        )


def is_small(requests: Sequence[Request], outputs: Iterable[RequestOutput]) -> bool:
    """Whether the answer to one body has at most `SMALL_ENTRIES`."""
    params, total = requests[0].params, 0
    for output in outputs:
        [completion] = output.outputs
        total += _CHOICE_ENTRIES + num_reported(len(output.prompt_tokens), params.prompt_logprobs)
        total += num_reported(len(completion.token_ids), params.logprobs)
        if completion.routed_experts is not None:
            total += completion.routed_experts.nbytes // _ENTRY_BYTES
    return total <= SMALL_ENTRIES


def chat_logprobs(tokens: Sequence[Reported], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat's choice, with the `top` most likely tokens of each."""

    def shown(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id)
        return {"token": text.decode("utf-8", "replace"), "logprob": _finite(logprob.logprob), "bytes": list(text)}

    return {
        "content": Lazy(
            shown(token_id, logprobs[token_id])
            | {"top_logprobs": [shown(top_id, logprobs[top_id]) for top_id in _best(logprobs, top)]}
            for token_id, logprobs in tokens
            if logprobs is not None
        )
    }


def completion_logprobs(
    tokens: Sequence[Reported], offsets: Sequence[int], top: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """`logprobs` of a completion's choice, with the `top` most likely tokens of each besides itself.

    Args:
        tokens: of the text; the first one of a prompt has no log probabilities.
        offsets: of each token, the characters of the text that are complete before it.
    """
    return {
        "text_offset": offsets,
        "token_logprobs": Lazy(
            None if logprobs is None else _finite(logprobs[token_id].logprob) for token_id, logprobs in tokens
        ),
        "tokens": Lazy(tokenizer.token_text(token_id) for token_id, _ in tokens),
        "top_logprobs": Lazy(
            None
            if logprobs is None
            else {
                tokenizer.token_text(top_id): _finite(logprobs[top_id].logprob)
                for top_id in [*_best(logprobs, top), token_id]
            }
            for token_id, logprobs in tokens
        ),
    }


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> Lazy:
    """vLLM's `prompt_logprobs`: for every token of the prompt, log probabilities by token id; None for the first one."""
    return Lazy(
        None
        if place is None
        else {
            str(token_id): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in place.items()
        }
        for place in logprobs
    )


def _best(logprobs: Mapping[int, Logprob], top: int) -> list[int]:
    return sorted(
        (token_id for token_id in logprobs if logprobs[token_id].rank <= top),
        key=lambda token_id: logprobs[token_id].rank,
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


EXPERTS_FIELD = "return_routed_experts"
_ENTRY_BYTES = 64
"""Bytes of experts that take as long an answer as an entry of log probabilities."""


def check_experts(has_experts: bool, returns_experts: bool, stream: bool | None) -> None:
    """Raise 400 for a body with `return_routed_experts` that cannot be answered."""
    if not has_experts:
        raise ApiError.bad("the model has no experts; fix: leave return_routed_experts out", EXPERTS_FIELD)
    if not returns_experts:
        raise ApiError.bad(
            "the server returns no experts; fix: start it with --enable-return-routed-experts", EXPERTS_FIELD
        )
    if stream:
        raise ApiError.bad("return_routed_experts cannot be streamed; fix: stream false", EXPERTS_FIELD)


def encoded_experts(experts: Any) -> str | None:
    """The field `routed_experts` as vLLM has it: a `.npy` file of int16 `[tokens, layers, experts]` in base64."""
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
