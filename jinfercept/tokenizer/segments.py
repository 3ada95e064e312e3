"""Tokens of texts, segment by segment: a text that shares segments with an earlier one is encoded only where it is new.

A segment begins with the name of a special token, which parts a text before anything else looks at it: normaliser,
pre-tokenizer and model see what stands between two such tokens, alone. So the tokens of a text are those of its segments, one
behind the other (`cutting_names` says for which names).
"""

from collections.abc import Collection

import tokenizers


def cutting_names(backend: tokenizers.Tokenizer, names: Collection[str]) -> frozenset[str]:
    """Those of the names that part a text wherever they stand in it, so that what they part is encoded independently.

    Such a token is searched in the text as it is given, strips no blanks, and has none at its ends; and its name never overlaps
    that of another added token. What stands before it sees the end of a text, and what stands behind it sees it too, since a
    segment begins with it: SentencePiece's first blank is that of the first segment.

    Args:
        backend: none of its names cuts if it has a part written in Python, which may look at the whole text, if it draws at
            random, or if it has a token that looks at the letters beside it.
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
    """Whether a backend has only parts of the library, and always encodes a text in the same way."""
    if any(getattr(backend.model, option, None) for option in ("dropout", "alpha", "nbest_size")):
        return False
    try:
        for part in (backend.normalizer, backend.pre_tokenizer):
            if part is not None:
                part.__getstate__()  # of a part written in Python there is none
    except Exception:  # tokenizers raises plain exceptions
        return False
    return True
