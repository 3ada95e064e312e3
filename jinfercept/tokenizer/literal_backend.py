"""A copy of a vocabulary that encodes the names of special tokens as literal text, and the tokens by secret aliases.

A text in which some names are tokens and others are literal is encoded in one pass.
"""

import copy
import secrets
from collections.abc import Sequence
from typing import NamedTuple, Self

import tokenizers

from jinfercept.errors import RequestError, shown


class LiteralBackend(NamedTuple):
    """The copy.

    Attributes:
        aliases: the secret alias of each special token, by its name.
        ids: the token ids, by the ids that the aliases have in the copy.
    """

    backend: tokenizers.Tokenizer
    aliases: dict[str, str]
    ids: dict[int, int]

    @classmethod
    def of(cls, original: tokenizers.Tokenizer, special_ids: frozenset[int]) -> Self:
        """A copy of `original` in which `special_ids` are special, declared so or not."""
        backend = copy.deepcopy(original)
        tokens = {id_: token for id_, token in backend.get_added_tokens_decoder().items() if id_ in special_ids}
        backend.add_special_tokens([_as(token, token.content, special=True) for token in tokens.values()])
        backend.encode_special_tokens = True
        secret = secrets.token_hex(8)
        aliases = {token.content: f"\ufdd0{secret}:{id_}\ufdd1" for id_, token in tokens.items()}
        backend.add_tokens([_as(token, aliases[token.content], special=False) for token in tokens.values()])
        places = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        ids = {places[aliases[token.content]]: id_ for id_, token in tokens.items()}
        return cls(backend, aliases, ids)

    def encode(self, text: str, own: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a text.

        Args:
            own: start and end offsets of the names that are special tokens, in ascending order.
        """
        at, parts = 0, []
        for start, stop in own:
            parts += [text[at:start], self.aliases[text[start:stop]]]
            at = stop
        return [self.ids.get(id_, id_) for id_ in encode(self.backend, "".join([*parts, text[at:]]))]


def _as(token: tokenizers.AddedToken, name: str, *, special: bool) -> tokenizers.AddedToken:
    """A token of another name that strips the same blanks."""
    return tokenizers.AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=special)


def encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text. Raises `RequestError` for a lone surrogate, which no encoding can express, and for what is no text."""
    if not isinstance(text, str):
        raise RequestError("a text is a string", got=shown(text), fix="give several one by one")
    try:  # a batch lets other threads run meanwhile, one text does not
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError as error:
        raise RequestError(
            "the text is not valid Unicode", got=ascii(text[:80]), fix="remove lone surrogates (\\ud800 to \\udfff)"
        ) from error
