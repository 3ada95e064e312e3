"""The tokenizer that a user gives instead of the one beside the weights, in any of the forms that there are of it."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from jinfercept.errors import ModelError, shown
from jinfercept.models.load import locate
from jinfercept.tokenizer.load import from_transformers, load_tokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type TokenizerChoice = "Tokenizer | str | Path | tokenizers.Tokenizer | PreTrainedTokenizerBase"
_FIX = "give a directory, a .gguf file or a hub id that has one, a fast tokenizer of transformers, or leave it out"


def as_tokenizer(choice: object) -> Tokenizer:
    """The tokenizer; a `Tokenizer` stays as it is.

    Args:
        choice: a `Tokenizer`; a name or a path, as of a model; a fast tokenizer of `transformers`, or one of `tokenizers`.

    Raises:
        ModelError: it is none of these, is not there, or cannot be used.
    """
    if isinstance(choice, Tokenizer):
        return choice
    if isinstance(choice, str | Path):
        try:
            source = locate(choice)
        except ModelError as error:
            raise ModelError("there is no such tokenizer", got=error.got, fix=_FIX) from error
        if (tokenizer := load_tokenizer(source)) is None:
            raise ModelError("the directory has no tokenizer", got=choice, fix=_FIX)
        return tokenizer
    if isinstance(choice, tokenizers.Tokenizer):
        return Tokenizer(copy.deepcopy(choice))
    if hasattr(choice, "special_tokens_map"):
        return from_transformers(copy.deepcopy(choice), set(), "tokenizer")
    raise ModelError("this is not a tokenizer", got=shown(choice), fix=_FIX)
