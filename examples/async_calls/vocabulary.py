"""Text to tokens: the vocabulary of a checkpoint, or one for the dialogues with the delimiters as special tokens."""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jinfercept.errors import ModelError
from jinfercept.tokenizer.tokenizer import Tokenizer

DELIMITERS = CALL, HEAD, END, TRAP, INTERRUPT = ("[CALL]", "[HEAD]", "[END]", "[TRAP]", "[INTR]")
END_OF_TEXT = "<|end|>"


@final
class Codec:
    """Encodes the parts of a dialogue. Delimiters that the vocabulary does not have as tokens are text.

    Attributes:
        end: the token that ends what the agent writes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer. Raises `ModelError` if it has no token that ends a text."""
        if not tokenizer.eos_token_ids:
            raise ModelError("the vocabulary has no end-of-text token", got="none", fix="use another checkpoint")
        self.tokenizer, self.end = tokenizer, min(tokenizer.eos_token_ids)
        self._parts = lru_cache(1 << 16)(lambda text: tuple(tokenizer.encode(text)))

    def prompt(self, text: str) -> list[int]:
        """The ids of the beginning of a dialogue, as the engine encodes a prompt."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def part(self, text: str) -> tuple[int, ...]:
        """The ids of a later part."""
        return self._parts(text)


def with_delimiters(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of a vocabulary in which every delimiter is a special token."""
    with TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        file = str(Path(folder, "tokenizer.json"))
        backend = Backend.from_file(file)
        backend.add_special_tokens(list(DELIMITERS))
        backend.save(file)
        return Tokenizer.from_saved(Path(folder))


def vocabulary(texts: Iterable[str]) -> Tokenizer:
    """Every word, number and punctuation of texts as one token, and single bytes for all else; delimiters are special.

    A word takes the space behind it along. Spaces around delimiters are dropped. So an id or a number is the same token in a
    prompt, a call and a result, and a model copies it without a translation.
    """
    splits = pre_tokenizers.Split(Regex("[A-Za-z]{2,} ?|[A-Za-z]|[0-9]+|[^A-Za-z0-9]+"), "isolated")
    pieces = pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    special, alphabet = [END_OF_TEXT, *DELIMITERS], sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = {part.strip(" ") for text in texts for part in re.split("|".join(map(re.escape, DELIMITERS)), text)}
    words = sorted({word for part in parts for word, _ in pieces.pre_tokenize_str(part)})
    ids = {token: id_ for id_, token in enumerate(dict.fromkeys([*special, *alphabet, *words]))}
    backend = Backend(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    backend.add_special_tokens(special)
    backend.normalizer = normalizers.Replace(Regex("^ +| +$"), "")  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pieces  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    end = ids[END_OF_TEXT]
    return Tokenizer(backend, eos_token_ids=frozenset({end}), special_tokens={"eos_token": END_OF_TEXT})
