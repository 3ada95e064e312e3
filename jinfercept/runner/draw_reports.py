"""What is reported of draws: log probabilities and ranks, packed on the device and read on the host."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jinfercept.runner.sampling import logprobs
from jinfercept.sampling_params import MAX_LOGPROBS, SamplingParams
from jinfercept.sched.plan import TokenLogprobs


def report(logits: Float[Array, "R V"], tokens: Int[Array, "R"]) -> Int32[Array, "R columns"]:
    """Rank, log probability, the likeliest tokens and their log probabilities: in one array, floats by their bits."""
    with jax.named_scope("logprobs"):
        logprob, rank, best, ids = logprobs(logits, tokens, MAX_LOGPROBS)
    floats = jnp.concatenate([logprob[:, None], best], axis=1)
    return jnp.concatenate([rank[:, None], ids, jax.lax.bitcast_convert_type(floats, jnp.int32)], axis=1)


def read_report(row: Int32[np.ndarray, "columns"], num_best: int) -> TokenLogprobs:
    """A row of `report`."""
    width = len(row) // 2
    ids, floats = row[1:width], row[width:].view(np.float32)
    best = zip(ids[:num_best].tolist(), floats[1 : 1 + num_best].tolist(), strict=True)
    return TokenLogprobs(float(floats[0]), int(row[0]), tuple(best))


def with_processed(
    reports: Sequence[TokenLogprobs | None],
    reported: Sequence[SamplingParams | None],
    logprobs: Float[Array, "R"],
    kept: UInt32[Array, "R words"],
    vocab_size: int,
) -> Iterator[TokenLogprobs | None]:
    """The reports, with what `sampling.processed` says where it is asked for."""
    keeps = any(params and params.return_kept_tokens for params in reported)
    words = np.asarray(kept) if keeps else None
    for row, (entry, params, logprob) in enumerate(zip(reports, reported, np.asarray(logprobs).tolist(), strict=False)):
        if entry is not None and params is not None and params.reports_processed:
            ids = _bits(words[row]) if words is not None and params.return_kept_tokens else None
            entry = entry._replace(processed=logprob, kept=ids if ids is None or len(ids) < vocab_size else None)
        yield entry


def _bits(words: UInt32[np.ndarray, "words"]) -> Int32[np.ndarray, "bits"]:
    """The places of the bits that are set, ascending."""
    return np.flatnonzero(np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")).astype(np.int32)
