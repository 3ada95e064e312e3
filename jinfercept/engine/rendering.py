"""Renders results as tokens for the model: within the tool's template, cut to the available room."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jinfercept.calls import Call, Result, Tool
from jinfercept.errors import shown

CHARS_PER_TOKEN = 32
"""Text longer than this many characters per allowed token is cut before it is encoded."""


def render_each(
    calls: tuple[Call, ...],
    results: tuple[Result, ...],
    tools: Mapping[str, Tool],
    room: int,
    vocab_size: int,
    encode: Callable[[str], list[int]] | None,
) -> tuple[list[int], tuple[Result, ...]]:
    """Render the results of one pause as `render` does, each in its tool's template, and join their tokens."""
    tokens: list[int] = []
    cut_results: list[Result] = []
    for call, result in zip(calls, results, strict=True):
        result_tokens, result = render(result, tools.get(call.name), room - len(tokens), vocab_size, encode)
        tokens += result_tokens
        cut_results.append(result)
    return tokens, tuple(cut_results)


def render(
    result: Result, tool: Tool | None, room: int, vocab_size: int, encode: Callable[[str], list[int]] | None
) -> tuple[list[int], Result]:
    """Render a result as tokens; return them, and the result as it was used.

    Args:
        tool: None if no tool has the called name.
        room: tokens that the sequence can still take.
        encode: None without a tokenizer; only results that are token ids can be read then.

    Returns:
        At most `room` tokens, and at most as many as the tool allows. A result that was cut ends with a note and the template's
        closing text, if there is room.
    """
    limit = min(room, tool.max_result_tokens if tool else room)
    if encode is not None and result.token_ids is not None:
        result = with_known_ids(result, vocab_size)
    if result.token_ids is not None:
        return _token_ids(result, result.token_ids, limit, vocab_size)
    if encode is None:
        return [], result
    before, _, after = (tool.result if tool else "{}").partition("{}")
    if len(result.text) <= CHARS_PER_TOKEN * limit:
        tokens = encode(before + result.text + after)
        if len(tokens) <= limit:
            return tokens, result
    return _cut(result, before, after, limit, encode)


def _cut(
    result: Result, before: str, after: str, limit: int, encode: Callable[[str], list[int]]
) -> tuple[list[int], Result]:
    head, note, tail = encode(before), encode(f" ... (cut: longer than {limit} tokens)"), encode(after)
    room_within = max(0, limit - len(head) - len(tail))
    body = encode(result.text[: CHARS_PER_TOKEN * limit])[: max(0, room_within - len(note))]
    tokens = [*head, *[*body, *note][:room_within], *tail][:limit]
    return tokens, replace(result, status="too_large" if result.status == "ok" else result.status)


def with_known_ids(result: Result, vocab_size: int) -> Result:
    """Replace a result that has token ids outside the vocabulary by an error for the model to read."""
    wrong = next((token for token in result.token_ids or () if not 0 <= token < vocab_size), None)
    if wrong is None:
        return result
    text = f"error: token ids are from 0 to {vocab_size - 1}; got {shown(wrong)}; return ids of this model, or a text"
    return replace(result, text=text, status="error", token_ids=None)


def _token_ids(result: Result, token_ids: tuple[int, ...], limit: int, vocab_size: int) -> tuple[list[int], Result]:
    # Without a tokenizer no error can be written: ids outside the vocabulary are dropped, and only the status tells.
    valid = [token for token in token_ids if 0 <= token < vocab_size]
    if len(valid) == len(token_ids) <= limit:
        return valid, result
    status = "error" if len(valid) < len(token_ids) else "too_large"
    return valid[:limit], replace(result, status=status, token_ids=tuple(valid[:limit]))
