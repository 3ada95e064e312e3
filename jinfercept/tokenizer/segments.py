"""Tokens of texts, segment by segment: a text that shares segments with an earlier one is encoded only where it is new.

A segment begins with the name of a special token, which parts a text before anything else looks at it: normaliser,
pre-tokenizer and model see what stands between two such tokens, alone. So the tokens of a text are those of its segments, one
behind the other (`cutting_names` says for which names).
"""

import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from sys import getsizeof
from typing import Protocol, final

import tokenizers

from jinfercept.tenants.quota import Quota

MOST_BYTES, MAX_AGE_S = 2**28, 3600.0
_ENTRY_BYTES = 200
"""Bytes of an entry besides its text and its tokens."""


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


class Segmented(Protocol):
    """Encodes segments; see `Tokenizer.encode_segments`."""

    def encode_segments(self, segments: Sequence[str]) -> list[list[int]]: ...


class _Segments:
    """The tokens of one tenant's segments of one salt, in two generations: `old` is dropped once `young` is full.

    Attributes:
        young, old: token ids as bytes of 32-bit numbers, by segments.
        since_s: when `young` was empty.
    """

    __slots__ = ("old", "old_bytes", "since_s", "tenant", "young", "young_bytes")

    def __init__(self, tenant: str, now: float) -> None:
        self.tenant = tenant
        self.young: dict[str, bytes] = {}
        self.old: dict[str, bytes] = {}
        self.young_bytes = self.old_bytes = 0
        self.since_s = now


@final
class SegmentTokens:
    """The tokens of the segments of all tenants' texts; each tenant and salt finds its own. Thread-safe.

    Space is shared fairly between tenants (`Quota`).

    Args:
        most_bytes: maximum bytes of texts and tokens.
        max_age_s: seconds after which an unused segment is forgotten, or up to twice as many.
        now: a monotonic clock.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, max_age_s: float = MAX_AGE_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes, self._max_age_s, self._now = most_bytes, max_age_s, now
        self._quota = Quota(2**63, most_bytes)
        self._segments: dict[str, _Segments] = {}
        self._lock = threading.Lock()

    def encode(self, tokenizer: Segmented, parts: Sequence[str], tenant: str, salt: str) -> "array[int]":
        """The ids of the text of these segments; of a single one nothing is stored, which no other text is likely to have.

        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding can express.
        """
        if len(parts) < 2:
            return array("i", [id_ for ids in tokenizer.encode_segments(parts) for id_ in ids])
        name = f"{tenant}\n{salt}"
        segments = self._segments.get(name) or _Segments(tenant, self._now())
        old, tokens = segments.old, list(map(segments.young.get, parts))
        if None in tokens:
            lacking = {part: old.get(part) for part, ids in zip(parts, tokens, strict=True) if ids is None}
            new = [part for part, ids in lacking.items() if ids is None]
            encoded = (array("i", ids).tobytes() for ids in tokenizer.encode_segments(new))
            added = {part: ids for part, ids in lacking.items() if ids is not None} | dict(
                zip(new, encoded, strict=True)
            )
            self._add(name, segments, added)
            tokens = [added[part] if ids is None else ids for part, ids in zip(parts, tokens, strict=True)]
        joined = array("i")
        joined.frombytes(b"".join(tokens))  # pyright: ignore[reportArgumentType] # none of them is None any more
        return joined

    def _add(self, name: str, segments: _Segments, added: Mapping[str, bytes]) -> None:
        """Add segments to the younger generation, and forget old ones and those beyond the limits."""
        num_bytes = sum(getsizeof(part) + getsizeof(ids) + _ENTRY_BYTES for part, ids in added.items())
        now, tenant, quota = self._now(), segments.tenant, self._quota
        with self._lock:
            segments = self._segments.setdefault(name, segments)
            quota.add(tenant, name)
            quota.charge(tenant, num_bytes)
            segments.young.update(added)
            segments.young_bytes += num_bytes
            if segments.young_bytes > self._most_bytes // 2 or now - segments.since_s > self._max_age_s:
                quota.charge(tenant, -segments.old_bytes)
                segments.old, segments.old_bytes = segments.young, segments.young_bytes
                segments.young, segments.young_bytes, segments.since_s = {}, 0, now
            while (victim := quota.victim(tenant)) is not None:
                self._shrink(victim)

    def _shrink(self, name: str) -> None:
        """Forget the older generation of a tenant's segments, or all of them if there is none."""
        segments = self._segments[name]
        num_bytes, segments.old, segments.old_bytes = segments.old_bytes, {}, 0
        self._quota.charge(segments.tenant, -num_bytes)
        if not num_bytes:
            del self._segments[name]
            self._quota.remove(segments.tenant, name)
            self._quota.charge(segments.tenant, -segments.young_bytes)
