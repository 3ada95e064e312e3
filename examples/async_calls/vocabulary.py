"""Text to tokens: the vocabulary of a checkpoint, or one for the dialogues with the delimiters as special tokens."""

from collections.abc import Iterable
from functools import lru_cache
from typing import final

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

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


def learn(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, learnt from texts; delimiters are special, and numbers no part of words."""
    backend = Backend(models.BPE())
    numbers, words = pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([numbers, words])  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = [END_OF_TEXT, *DELIMITERS]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    end = special.index(END_OF_TEXT)  # special tokens come first
    return Tokenizer(backend, eos_token_ids=frozenset({end}), special_tokens={"eos_token": END_OF_TEXT})
