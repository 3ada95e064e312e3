"""A copy of a vocabulary that encodes the names of special tokens as literal text, and the tokens by secret aliases.

A text in which some names are tokens and others are literal is encoded in one pass.
"""

import copy
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import tokenizers

from jinfercept.errors import RequestError, shown

_SURROGATE = re.compile("[\ud800-\udfff]")


class LiteralBackend(NamedTuple):
    """The copy.

    Attributes:
        aliases: the secret alias of each special token, by its name.
        ids: the token ids, by the ids that the aliases have in the copy.
        secret: what the aliases, and the texts that have them, begin with.
    """

    backend: tokenizers.Tokenizer
    aliases: dict[str, str]
    ids: dict[int, int]
    secret: str

    @classmethod
    def of(cls, original: tokenizers.Tokenizer, special_ids: frozenset[int]) -> Self:
        """A copy of `original` in which `special_ids` are special, declared so or not."""
        backend = copy.deepcopy(original)
        tokens = {id_: token for id_, token in backend.get_added_tokens_decoder().items() if id_ in special_ids}
        backend.add_special_tokens([_as(token, token.content, special=True) for token in tokens.values()])
        backend.encode_special_tokens = True
        secret = f"\x01{secrets.token_hex(8)}"  # of one byte a character, as most texts
        aliases = {token.content: f"{secret}:{id_}\x02" for id_, token in tokens.items()}
        backend.add_tokens([_as(token, aliases[token.content], special=False) for token in tokens.values()])
        places = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        ids = {places[aliases[token.content]]: id_ for id_, token in tokens.items()}
        return cls(backend, aliases, ids, secret)

    def aliased(self, text: str, own: Iterable[tuple[int, int]]) -> str:
        """A text with aliases, for `encode`. No other text begins as it does.

        Args:
            own: start and end offsets of the names that are special tokens, in ascending order.
        """
        at, parts = 0, [self.secret]
        for start, stop in own:
            parts += [text[at:start], self.aliases[text[start:stop]]]
            at = stop
        return "".join([*parts, text[at:]])

    def encode(self, aliased: Sequence[str]) -> list[list[int]]:
        """The ids of each of the texts that `aliased` has returned."""
        texts = [text.removeprefix(self.secret) for text in aliased]
        return [[self.ids.get(id_, id_) for id_ in ids] for ids in encode(self.backend, texts)]


def _as(token: tokenizers.AddedToken, name: str, *, special: bool) -> tokenizers.AddedToken:
    """A token of another name that strips the same blanks."""
    return tokenizers.AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=special)


def encode(backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
    """The ids of each text. Raises `RequestError` for a lone surrogate, which has no encoding, and for what is no text."""
    for text in texts:
        if not isinstance(text, str):
            raise RequestError("a text is a string", got=shown(text), fix="give several one by one")
    try:  # a batch lets other threads run meanwhile, one text does not
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
    except TypeError as error:
        invalid = next(filter(_SURROGATE.search, texts), "")
        raise RequestError(
            "the text is not valid Unicode", got=ascii(invalid[:80]), fix="remove lone surrogates (\\ud800 to \\udfff)"
        ) from error
