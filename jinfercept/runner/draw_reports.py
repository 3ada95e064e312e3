"""What is reported of draws: log probabilities and ranks, packed on the device and read on the host."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jinfercept.runner.logits_processors import SampleRows
from jinfercept.runner.sampling import logprobs, processed
from jinfercept.sampling_params import MAX_LOGPROBS, SamplingParams
from jinfercept.sched.plan import TokenLogprobs


def report(
    logits: Float[Array, "R V"],
    shaped: Float[Array, "R V"],
    bound: Float[Array, "R"],
    tokens: Int[Array, "R"],
    rows: SampleRows,
) -> tuple[Int32[Array, "R columns"], UInt32[Array, "R words"]]:
    """In one array rank, log probability, the likeliest tokens with theirs, and the log probability in the distribution of the
    draw, floats by their bits; and the tokens of that distribution, see `processed`.

    Args:
        logits: of the model.
        shaped, bound, rows: of the draw.
    """
    with jax.named_scope("logprobs"):
        logprob, rank, best, ids = logprobs(logits, tokens, MAX_LOGPROBS)
        drawn, kept_mask = processed(shaped, bound, tokens, rows)
    floats = jnp.concatenate([logprob[:, None], best, drawn[:, None]], axis=1)
    return jnp.concatenate([rank[:, None], ids, jax.lax.bitcast_convert_type(floats, jnp.int32)], axis=1), kept_mask


def read_report(row: Int32[np.ndarray, "columns"], num_best: int) -> TokenLogprobs:
    """A row of `report`, by the model's own logits."""
    width = len(row) // 2
    ids, floats = row[1:width], row[width:-1].view(np.float32)
    best = zip(ids[:num_best].tolist(), floats[1 : 1 + num_best].tolist(), strict=True)
    return TokenLogprobs(float(floats[0]), int(row[0]), tuple(best))


def read_reports(
    reports: Int32[Array, "R columns"],
    kept_mask: UInt32[Array, "R words"] | None,
    reported: Sequence[SamplingParams | None],
    vocab_size: int,
) -> Iterator[TokenLogprobs | None]:
    """What the parameters of each row ask for; None for rows without."""
    keeps = kept_mask is not None and any(params and params.return_kept_tokens for params in reported)
    words = np.asarray(kept_mask) if keeps else None
    for place, (row, params) in enumerate(zip(np.asarray(reports), reported, strict=False)):
        if params is None:
            yield None
            continue
        entry = read_report(row, params.logprobs or 0)
        if params.reports_processed:
            ids = _kept(words[place], vocab_size) if words is not None and params.return_kept_tokens else None
            entry = entry._replace(processed=float(row[-1:].view(np.float32)[0]), kept=ids)
        yield entry


def _kept(words: UInt32[np.ndarray, "words"], vocab_size: int) -> Any:
    """The tokens whose bits are set, as `outputs.KeptTokens` takes them: as ids or as bits, whichever are smaller."""
    size = int(np.bitwise_count(words).sum())
    return None if size == vocab_size else _bits(words) if size <= len(words) else partial(_bits, words.copy())


def _bits(words: UInt32[np.ndarray, "words"]) -> Int32[np.ndarray, "bits"]:
    """The places of the bits that are set, ascending."""
    return np.flatnonzero(np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")).astype(np.int32)
