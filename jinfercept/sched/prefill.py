"""Chooses between chunked prefill and whole prompts. A pure function."""

from jinfercept.errors import ConfigError


def chunks_prefill(
    asked: bool | None, *, published: bool, largest_step: int, longest: int, chunk_tokens: int | None
) -> bool:
    """Whether prefill is chunked.

    Args:
        asked: the user's choice; None: as published where steps are large enough for that, else chunked.
        published: whether the policy was published with chunked prefill.
        largest_step: query tokens of the largest executable.
        longest: tokens of the longest sequence, which without chunks has to fit into one step.
        chunk_tokens: the user's limit on chunks, which implies them; None: none.

    Raises:
        ConfigError: the user asks for whole prompts, and no step holds the longest.
    """
    fits = longest <= largest_step and chunk_tokens is None
    if asked is False and not fits:
        raise ConfigError(
            "chunked_prefill can only be turned off where a step holds the longest sequence",
            got=f"steps of {largest_step} tokens, sequences of {longest}, max_chunk_tokens={chunk_tokens}",
            fix="raise max_num_batched_tokens or lower max_model_len, and give no max_chunk_tokens",
        )
    return asked if asked is not None else published or not fits
