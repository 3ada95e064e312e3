"""API keys: the key of a request, its permissions, and the salt that separates the contexts of two keys."""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from typing import final

from jinfercept.serve.access.key_file import KeyRules, key_digest
from jinfercept.serve.protocols.errors import ApiError


@final
class Keys:
    """The API keys of a server, by `key_digest`. Without keys every request is accepted, and all belong to one tenant."""

    def __init__(self, rules: Mapping[str, KeyRules]) -> None:
        self._rules = dict(rules)

    def replace(self, rules: Mapping[str, KeyRules]) -> str:
        """Use other rules from now on; returns the names of keys whose rules changed, with commas.

        Requests in progress of a key that is gone go on. A server without keys gets none later.
        """
        assert self._rules
        assert rules
        before, self._rules = self._rules, dict(rules)
        return ", ".join(sorted({of.name for _, of in before.items() ^ self._rules.items()}))

    def rules(self, tenant: str) -> KeyRules:
        """The rules of a tenant; those of a key that is gone, and of a server without keys, limit nothing."""
        return self._rules.get(tenant) or KeyRules()

    @property
    def needed(self) -> bool:
        return bool(self._rules)

    @property
    def tenants(self) -> Collection[str]:
        return self._rules.keys()

    def check(self, *authorizations: str) -> str:
        """The tenant of a request: its key's digest, "" if no key is needed. Takes constant time for all keys.

        Args:
            authorizations: values of the headers `Authorization`; one of them, `Bearer KEY`, is needed.

        Raises:
            ApiError: 401; 400 for several values.
        """
        if not self._rules:
            return ""
        if len(authorizations) > 1:
            raise ApiError.bad("the request has two different API keys; fix: send one")
        authorization = authorizations[0] if authorizations else None
        scheme, _, key = (authorization or "").partition(" ")
        sent_digest = key_digest(key.strip())
        matches = [hmac.compare_digest(sent_digest, digest) for digest in self._rules]
        if scheme.lower() != "bearer" or not key.strip() or not any(matches):
            raise ApiError(
                401,
                "the API key is wrong" if authorization else "no API key was sent; fix: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return sent_digest

    def watched_by(self, tenant: str) -> str | None:
        """The tenant whose requests a key may see and whose calls it may answer: its own; None: all tenants."""
        return None if not tenant or self.rules(tenant).operator else tenant

    def check_operator(self, tenant: str) -> None:
        """Raise `ApiError` 403 for a key that is no operator's, on a server with keys."""
        if self.watched_by(tenant) is not None:
            raise ApiError(403, "this path needs an operator's key (--operator-key)", code="operator_key_needed")

    def priority(self, tenant: str, requested: int) -> int:
        if not tenant:
            return requested
        least, most = self.rules(tenant).priority
        return min(max(requested, least), most)

    def name(self, tenant: str) -> str:
        return self.rules(tenant).name


def isolation(key: str, cache_salt: str | None) -> str:
    """The salt of a client's pages and stored data: keys share nothing, nor do cache salts of one key."""
    if not key and not cache_salt:
        return ""
    return hashlib.sha256(f"{key}/{cache_salt or ''}".encode()).hexdigest()
