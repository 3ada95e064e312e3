"""A vocabulary of single bytes and a few longer tokens."""

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfercept.tokenizer.tokenizer import Tokenizer

MERGES = [('"', ":"), ("{", '"'), ('"', ","), ("Ġ", '"'), ("a", "b"), ("ab", "c"), ("t", "r"), ("u", "e"), ("tr", "ue")]
VOCAB = 290
"""Columns of a model's logits: padded, and no multiple of 32."""


@cache
def letters() -> Tokenizer:
    """Byte-level, with two tokens that end a text: `<end>` and `<turn>`."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens(["<start>", "<end>", "<turn>"])
    ends = backend.encode("<end><turn>").ids
    return Tokenizer(backend, eos_token_ids=frozenset(ends))
