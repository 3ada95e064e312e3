"""Builds a fast tokenizer from a SentencePiece vocabulary in GGUF: pieces, their kinds, their scores.

The families that use it (Llama 2, Mistral, Vicuna) were trained with SentencePiece's BPE: text becomes characters, and the two
neighbours whose joint piece has the best score are joined first. That is a BPE whose merges are ordered by these scores.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"


def sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """The tokenizer without special tokens; characters that are no piece become bytes.

    Args:
        metadata: with `tokenizer.ggml.scores`, one per token; `token_type`, `unknown_token_id` and `add_space_prefix` if there.
        tokens: the pieces by id.
    """
    scores = metadata["tokenizer.ggml.scores"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    pieces = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(pieces, {token: i for i, token in enumerate(tokens)}),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])  # pyright: ignore
    stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return backend


def _merges(pieces: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best pieces first."""
    merges = [
        (-score, ids[left], ids[right], left, right)
        for piece, score in pieces.items()
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        if left in pieces and right in pieces
    ]
    return [(left, right) for *_, left, right in sorted(merges)]
