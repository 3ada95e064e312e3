"""API keys: who may come, and whose contexts are whose."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import final

from jinfercept.server.errors import ApiError


@final
class Keys:
    """The keys that are known; none: everybody may come.

    Args:
        keys: as clients write them.
        operators: those of them that belong to people who look after the server.
    """

    def __init__(self, keys: Sequence[str], operators: Sequence[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]
        self._operators = frozenset(_digest(key).hex() for key in operators)

    def check(self, authorization: str | None) -> str:
        """Who it is: a digest of the key, "" where none is needed. The time does not depend on which key is near.

        Args:
            authorization: the header, `Bearer KEY`.

        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "the API key is wrong" if authorization else "an API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.hex()

    def watched_by(self, owner: str) -> str | None:
        """Whose calls one may see and answer: its own, or, as None, everybody's.

        Args:
            owner: what `check` said.
        """
        return None if not owner or owner in self._operators else owner


def isolation(key: str, cache_salt: str | None) -> str:
    """The salt of everything that one client leaves behind: nothing is shared between keys, nor between salts of one key.

    Args:
        key: what `Keys.check` said.
        cache_salt: the body's.
    """
    if not key and not cache_salt:
        return ""
    return hashlib.sha256(f"{key}/{cache_salt or ''}".encode()).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
