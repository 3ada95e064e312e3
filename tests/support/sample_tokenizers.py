"""Tokenizers: a small byte-level one, one of Llama 2's kind, and the embedded model's; the tokens that a mask allows."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.models import embedded

MERGES = [('"', ":"), ("{", '"'), ('"', ","), ("Ġ", '"'), ("a", "b"), ("ab", "c"), ("t", "r"), ("u", "e"), ("tr", "ue")]


VOCAB = 290
"""Columns of a model's logits: padded, and no multiple of 32."""


def byte_backend(
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str | tokenizers.AddedToken] = (),
    *,
    alphabet: Iterable[str] | None = None,
    use_regex: bool = False,
) -> tokenizers.Tokenizer:
    """A token for each byte, or each of an alphabet's, one for each merge, and special ones."""
    words = [*(alphabet or sorted(pre_tokenizers.ByteLevel.alphabet())), *map("".join, merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[*merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens([*special])
    return backend


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A copy of what computes its tokens."""
    return tokenizer.to_transformers().backend_tokenizer


def ended(backend: tokenizers.Tokenizer, ends: str = "<end>") -> Tokenizer:
    """The tokenizer for which these tokens end a text."""
    return Tokenizer(backend, eos_token_ids=frozenset(backend.encode(ends).ids))


@cache
def byte_level() -> Tokenizer:
    """Byte-level, with two tokens that end a text: `<end>` and `<turn>`."""
    return ended(byte_backend(MERGES, ["<start>", "<end>", "<turn>"], use_regex=True), "<end><turn>")


@cache
def smollm2() -> Tokenizer:
    tokenizer = load_tokenizer(embedded.fetch())
    assert tokenizer is not None
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: a space is an underscore, a text begins with one, unknown characters are bytes."""
    words = ["<s>", "▁", "a", "b", "▁a", "▁b", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
    backend.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def closed_objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of objects with no other properties than the declared ones, whose names need escapes and whose order matters."""
    return st.builds(
        lambda some, required: {
            "type": "object",
            "properties": some,
            "required": sorted(some)[:required],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "b c", 'd"', "é"]), values, max_size=3),
        st.integers(0, 3),
    )


END = 1


def ids(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
