"""API keys: which key a request has, what the key may do, and the salt that keeps the contexts of two keys apart."""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from typing import final

from jinfercept.server.errors import ApiError
from jinfercept.server.key_file import KeyRules, key_digest


@final
class Keys:
    """The API keys of a server; none: every request may come, and all are of one tenant.

    Args:
        rules: by `key_digest`.
    """

    def __init__(self, rules: Mapping[str, KeyRules]) -> None:
        self._rules = dict(rules)

    @property
    def needed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._rules)

    @property
    def owners(self) -> Collection[str]:
        """The tenants that there are; none without keys."""
        return self._rules.keys()

    def check(self, *authorizations: str) -> str:
        """The tenant of a request: its key's digest, "" where no key is needed. Takes as long for one key as for another.

        Args:
            authorizations: the headers of this name, one of `Bearer KEY`.

        Raises:
            ApiError: 401; 400 for two headers.
        """
        if not self._rules:
            return ""
        if len(authorizations) > 1:
            raise ApiError.bad("the request has two Authorization headers: send one")
        authorization = authorizations[0] if authorizations else None
        scheme, _, key = (authorization or "").partition(" ")
        given = key_digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._rules]
        if scheme.lower() != "bearer" or not key.strip() or not any(known):
            raise ApiError(
                401,
                "the API key is wrong" if authorization else "an API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given

    def watched_by(self, owner: str) -> str | None:
        """The tenant whose requests a key may see and whose calls it may answer: its own, or, as None, every tenant's.

        Args:
            owner: what `check` returned.
        """
        return None if not owner or self._rules[owner].operator else owner

    def priority(self, owner: str, asked: int) -> int:
        """The priority of a request: what it asks for, within what its key may; without keys, what it asks for.

        Args:
            owner: what `check` returned.
        """
        if not owner:
            return asked
        least, most = self._rules[owner].priority
        return min(max(asked, least), most)

    def name(self, owner: str) -> str:
        """What stands for a key in logs; "" without keys."""
        return self._rules[owner].name if owner else ""


def isolation(key: str, cache_salt: str | None) -> str:
    """The salt of everything that one client leaves behind: nothing is shared between keys, nor between salts of one key.

    Args:
        key: what `Keys.check` said.
        cache_salt: the body's.
    """
    if not key and not cache_salt:
        return ""
    return hashlib.sha256(f"{key}/{cache_salt or ''}".encode()).hexdigest()
