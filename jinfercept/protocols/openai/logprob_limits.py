"""Limits on the log probabilities that a body may request: they make the largest answers of a server."""

from collections.abc import Iterable, Sequence

from jinfercept.outputs import RequestOutput
from jinfercept.protocols.errors import ApiError
from jinfercept.request import Request

MAX_ENTRIES = 2**20
"""Maximum entries of one body, over all prompts and choices. An entry is one log probability: 60 to 120 bytes of an answer."""
SMALL_ENTRIES = 2**14
"""Maximum entries of an answer that is encoded on the event loop, within some milliseconds."""


def num_reported(tokens: int, best: int | None) -> int:
    """Entries of a report.

    Args:
        tokens: number of reported tokens.
        best: number of most likely tokens reported for each, besides itself; None: there is no report.
    """
    return 0 if best is None else tokens * (1 + best)


def check_report(
    requests: Sequence[Request],
    max_model_len: int,
    prompt: Iterable[tuple[str, int | None]],
    answer: tuple[str, int | None],
    *,
    per_choice: bool = False,
    copies: int = 1,
) -> None:
    """Raise 400 for more than `MAX_ENTRIES`.

    Args:
        requests: of one body; forks follow the request they are forked from.
        max_model_len: tokens that a prompt and its answer may have together.
        prompt: for each report of the prompt, the field that requests it and its number of best tokens.
        answer: field and number of best tokens of the report of the generated tokens.
        per_choice: whether every choice carries the report of its prompt, or only the first of each prompt.
        copies: number of times that an answer carries the report of a generated token.
    """
    asked: dict[str, int] = {}
    for request in requests:
        length, most = len(request.prompt_token_ids), request.params.max_tokens
        room = max_model_len - length
        field, best = answer
        asked[field] = asked.get(field, 0) + copies * num_reported(room if most is None else min(most, room), best)
        for field, best in prompt if per_choice or request.leader is None else ():
            asked[field] = asked.get(field, 0) + num_reported(length, best)
    total = sum(asked.values())
    if total > MAX_ENTRIES:
        field = max(asked, key=lambda name: asked[name])
        raise ApiError.bad(
            f"a body may ask for {MAX_ENTRIES} log probabilities, over all tokens and choices; got {total}, "
            f"{asked[field]} of them by {field}; fix: a smaller {field}, n or max_tokens, or fewer prompts",
            field,
        )


def is_small(outputs: Iterable[RequestOutput], prompt: Sequence[int | None], answer: int | None) -> bool:
    """Whether an answer has at most `SMALL_ENTRIES`.

    Args:
        outputs: one for each choice.
        prompt: number of best tokens of each report of the prompt.
        answer: number of best tokens of the report of the generated tokens.
    """
    total = 0
    for output in outputs:
        total += sum(num_reported(len(output.prompt_token_ids), best) for best in prompt)
        total += sum(num_reported(len(one.token_ids), answer) for one in output.outputs)
    return total <= SMALL_ENTRIES
