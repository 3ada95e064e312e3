"""Splits a text into segments at special tokens, and distinguishes tokens from literal names.

A segment begins with the name of a special token, which splits a text before anything else reads it: normaliser, pre-tokenizer
and model see only the text between two such tokens. So the tokens of a text are those of its segments in a row, and a text that
shares segments with an earlier one is encoded only where it is new.
"""

import copy
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Self

import tokenizers

from jinfercept.errors import RequestError, shown


def cutting_names(backend: tokenizers.Tokenizer, names: Collection[str]) -> frozenset[str]:
    """Return the names that split a text wherever they stand, so that the parts are encoded independently.

    Such a token is searched in the given text, strips no blanks, and has none at its ends; its name never overlaps that of
    another added token. The text before it sees the end of a text, and so does the text after it, since a segment begins with
    the token: SentencePiece's first blank belongs to the first segment. No name splits in a backend with a part written in
    Python, which may look at the whole text, with random draws, or with a token that looks at the letters beside it.
    """
    tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if not _is_local(backend) or any(token.single_word for token in tokens.values()):
        return frozenset()
    normalizer = backend.normalizer
    in_given_text = normalizer is None or normalizer.__getstate__() == b'{"type":"Sequence","normalizers":[]}'
    heads = {name[:size] for name in tokens for size in range(1, len(name))}
    tails = {name[-size:] for name in tokens for size in range(1, len(name))}
    everything = "\U0010ffff".join(tokens)

    def is_apart(name: str) -> bool:
        sizes = range(1, len(name) + 1)
        inner = (name[at : at + size] for size in sizes[:-1] for at in range(len(name) - size + 1))
        return (
            everything.count(name) == 1
            and not any(name[:size] in tails or name[-size:] in heads for size in sizes)
            and tokens.keys().isdisjoint(inner)
        )

    return frozenset(
        name
        for name in names
        if (token := tokens.get(name)) is not None
        and name
        and name == name.strip()
        and not (token.lstrip or token.rstrip)
        and (in_given_text or not token.normalized)
        and is_apart(name)
    )


def _is_local(backend: tokenizers.Tokenizer) -> bool:
    if any(getattr(backend.model, option, None) for option in ("dropout", "alpha", "nbest_size")):
        return False
    try:
        for part in (backend.normalizer, backend.pre_tokenizer):
            if part is not None:
                part.__getstate__()  # of a part written in Python there is none
    except Exception:  # tokenizers raises plain exceptions
        return False
    return True


_SURROGATE = re.compile("[\ud800-\udfff]")


class LiteralBackend(NamedTuple):
    """A copy of a vocabulary that encodes names of special tokens as literal text, and the tokens by secret aliases.

    A text in which some names are tokens and others are literal is encoded in one pass.
    """

    backend: tokenizers.Tokenizer
    aliases: dict[str, str]  # by name of the special token
    ids: dict[int, int]  # the token ids, by the ids that the aliases have in the copy
    secret: str  # beginning of the aliases, and of the texts that have them

    @classmethod
    def of(cls, original: tokenizers.Tokenizer, special_ids: frozenset[int]) -> Self:
        """Copy `original` so that `special_ids` are special, whether declared so or not."""
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
        """Write aliases into a text, for `encode`. No other text begins as it does.

        Args:
            own: start and end offsets of the names that are special tokens, in ascending order.
        """
        at, parts = 0, [self.secret]
        for start, stop in own:
            parts += [text[at:start], self.aliases[text[start:stop]]]
            at = stop
        return "".join([*parts, text[at:]])

    def encode(self, aliased: Sequence[str]) -> list[list[int]]:
        """Encode texts from `aliased`."""
        texts = [text.removeprefix(self.secret) for text in aliased]
        return [[self.ids.get(id_, id_) for id_ in ids] for ids in encode(self.backend, texts)]


def _as(token: tokenizers.AddedToken, name: str, *, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=special)


def encode(backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
    """Encode texts. Raises `RequestError` for a lone surrogate, which has no encoding, and for a value that is no string."""
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
