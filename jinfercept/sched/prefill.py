"""Whether long contexts are computed in chunks beside the decodes of others, or whole and first. A pure choice."""

from jinfercept.errors import ConfigError


def chunks_prefill(
    asked: bool | None, *, published: bool, largest_step: int, longest: int, chunk_tokens: int | None
) -> bool:
    """Whether prefill is chunked.

    Args:
        asked: by the user; None: as published where that can be, else chunked.
        published: whether the policy was published with chunked prefill.
        largest_step: query tokens of the largest executable.
        longest: tokens of the longest sequence, which without chunks has to fit into one step.
        chunk_tokens: a limit on chunks; there are chunks then.

    Raises:
        ConfigError: whole prompts were asked for, and there is no step for them.
    """
    fits = longest <= largest_step and chunk_tokens is None
    if asked is False and not fits:
        raise ConfigError(
            "chunked_prefill can only be turned off where a step holds the longest sequence",
            got=f"steps of {largest_step} tokens, sequences of {longest}, max_chunk_tokens={chunk_tokens}",
            fix="raise max_num_batched_tokens or lower max_model_len, and give no max_chunk_tokens",
        )
    return asked if asked is not None else published or not fits
