"""Splits a text into segments at special tokens, and distinguishes tokens from literal names.

A segment begins with the name of a special token, which splits a text before anything else reads it: normaliser, pre-tokenizer
and model see only the text between two such tokens. So the tokens of a text are those of its segments in a row, and a text that
shares segments with an earlier one is encoded only where it is new.

Names of special tokens in text from clients and tools are escaped, so that only a chat template's own names become tokens.
A chat template joins its own text, which names special tokens, with given text, which may name them too. Before rendering, a
mark is put inside every name in a given text, and at an end of the text that could form a name together with its neighbours.
The marks are removed from the rendered text, and a name that had a mark inside is encoded as text.

Plain words are not escaped: a template that writes `<|` and `|>` around a given role makes that role's token. Names of one
character are not escaped either.
"""

import copy
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self, final

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


class Rendered(str):
    """A text that a template has written."""

    # offsets within or beside names of special tokens that come from given text, not from the template
    breaks: tuple[int, ...]

    def __new__(cls, text: str, breaks: tuple[int, ...] = ()) -> "Rendered":
        rendered = super().__new__(cls, text)
        rendered.breaks = breaks
        return rendered

    def since(self, start: int) -> "Rendered":
        return Rendered(self[start:], tuple(place - start for place in self.breaks if place >= start))

    def without(self, part: str) -> "Rendered":
        """Remove a part that a template writes once, and that contains no break."""
        at = self.index(part)
        places = (place - len(part) if place > at else place for place in self.breaks)
        return Rendered(self.replace(part, ""), tuple(places))


@final
class SpecialTokenNames:
    """Names of the special tokens of one vocabulary."""

    def __init__(
        self,
        names: Collection[str],
        # names of added tokens that are not special; a template may cut a text at them and join the rest
        words: Collection[str] = (),
        # the vocabulary's normaliser, if the tokenizer searches the normalised text for names
        fold: Callable[[str], str] | None = None,
        mark: str = "",  # a character that no text has; "": a random one for private use
    ) -> None:
        self._mark = mark or chr(0xF0000 + secrets.randbelow(0xFFFE))
        self._marks = (self._mark, json.dumps(self._mark)[1:-1], repr(self._mark)[1:-1])  # as templates may write it
        self._names = frozenset(name for name in names if len(name) > 1)
        self._words, self._fold = tuple(words), fold
        self._fewer: dict[frozenset[str], SpecialTokenNames] = {}
        self._begin = _one_of({name[0] for name in self._names})
        self._end = _one_of({name[-1] for name in self._names})
        sign = _one_of({c for name in self._names for c in (name[0], name[-1], *re.findall(r"[^\w\s]", name))})
        self._looked_at = sign.search if fold is None else lambda text: not text.isascii() or sign.search(text)
        self._beginning = re.compile(f"(?={_any_of(self._names)})(.)", re.DOTALL)
        self._added = re.compile(_any_of({*self._names, *self._words}))
        self._cut = re.compile(f"({_any_of(self._words)})")
        self._longest = max(map(len, self._names), default=0)
        self._joined = "\n".join(sorted(self._names))
        parts = {(name[:at], name[at:]) for name in self._names for at in range(1, len(name))}
        self._heads = frozenset(tail for _, tail in parts if re.search(r"\W", tail))
        self._tails = frozenset(head for head, _ in parts if re.search(r"\W", head))

    def but(self, names: frozenset[str]) -> "SpecialTokenNames":
        if not names & self._names:
            return self
        if names not in self._fewer:
            self._fewer[names] = SpecialTokenNames(self._names - names, (*self._words, *names), self._fold, self._mark)
        return self._fewer[names]

    def marked[T](self, value: T) -> T:
        """Copy a JSON value, with marks in its texts and keys. Raises `RequestError` if it is nested too deeply."""
        try:
            return self._marked(value)
        except RecursionError as error:
            raise RequestError(
                "messages, tools and chat_template_kwargs are nested too deeply",
                got=type(value).__name__,
                fix="flatten them",
            ) from error

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked_text(value) if self._looked_at(value) else value
        if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101 # the first is quick
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _marked_text(self, text: str) -> str:
        mark = self._mark
        if self._fold is not None and self._beginning.search(self._fold(text)):
            return mark + self._beginning.sub(rf"\1{mark}", text)
        if self._added.search(text) is None:
            return self._marked_ends(text)
        pieces = self._cut.split(text) if self._words else [text]
        marked = [
            piece if place % 2 else self._beginning.sub(rf"\1{mark}", self._marked_ends(piece))
            for place, piece in enumerate(pieces)
        ]
        return text if marked == pieces else "".join(marked)

    def _marked_ends(self, piece: str) -> str:
        core, mark = piece.strip(), self._mark
        head = tail = ""
        if len(core) < self._longest and core in self._joined and re.search(r"\W", core):
            head = tail = mark
        if self._end.search(core, 0, self._longest - 1):
            head = mark if any(core[:size] in self._heads for size in range(1, self._longest)) else head
        if self._begin.search(core, max(0, len(core) - self._longest + 1)):
            tail = mark if any(core[-size:] in self._tails for size in range(1, self._longest)) else tail
        # blanks stay outside of the marks, so that a template can strip them
        if head or tail:
            start = piece.index(core)
            return piece[:start] + head + core + tail + piece[start + len(core) :]
        return piece

    def unmarked(self, text: str) -> Rendered:
        """Remove the marks from a text that a template has written."""
        if not any(mark in text for mark in self._marks):
            return Rendered(text)
        pieces = re.split("|".join(map(re.escape, self._marks)), text)
        return Rendered("".join(pieces), tuple(accumulate(map(len, pieces[:-1]))))

    def own(self, text: str, breaks: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the spans of the template's own names of special tokens in a rendered text; None if there are no other names.

        Args:
            text: without marks.
            breaks: offsets of the removed marks, in ascending order.
        """
        places = list(self._matches(text, breaks))
        if self._fold is None and all(span is not None for span in places):
            return None
        return [span for span in places if span is not None]

    def _matches(self, text: str, breaks: Sequence[int]) -> Iterator[tuple[int, int] | None]:
        # names as a tokenizer finds them, leftmost first and then longest; None for a name in given text
        next_break, matches = -1, self._added.finditer(text)
        while True:
            for match in matches:
                start, stop = match.span()
                if match[0] in self._names:
                    if next_break < stop:
                        following = bisect_right(breaks, start)
                        next_break = breaks[following] if following < len(breaks) else len(text)
                    if start < next_break < stop:
                        yield None
                        matches = self._added.finditer(text, start + 1)
                        break
                    yield start, stop
            else:
                return


def _one_of(chars: Collection[str]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(''.join(sorted(chars)))}]" if chars else "(?!)")


def _any_of(names: Collection[str]) -> str:
    if not names:
        return "(?!)"
    # a tree is matched in a time that does not grow with the number of names
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _branches(below) for char, below in sorted(node.items()) if char]
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}" if branches else ""
