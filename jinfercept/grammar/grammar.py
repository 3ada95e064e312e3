"""`Grammars`: compiles grammars over one vocabulary and keeps the last ones.

A grammar is compiled once, in the thread that asks for it; every request has its own state of it.
"""

import json
import threading
from copy import copy
from functools import cache
from hashlib import sha256
from math import inf
from time import monotonic
from typing import Protocol, final

from jinfercept.grammar.compiler import compile_matcher, make_vocabulary
from jinfercept.grammar.constraint import JsonText, JsonTokens, TokenGrammar
from jinfercept.grammar.forbidden_text import ForbiddenText
from jinfercept.grammar.limits import check_limits, num_compiled_bytes
from jinfercept.tenants.quota import ExpiringEntries, Quota
from jinfercept.tokenizer.tokenizer import Tokenizer

MAX_COMPILED = 256
"""Limit of the grammars that are kept."""
MAX_COMPILED_BYTES = 2**26
"""Limit of the bytes of the grammars that are kept, for all tenants together."""


class GrammarSource(Protocol):
    """A grammar to compile; `StructuredOutputsParams` are one."""

    @property
    def source(self) -> tuple[str, str]:
        """The kind of grammar, as llguidance calls it or one of `structured_outputs.KINDS`, and its text."""
        ...


@final
class Grammars:
    """Compiles the grammars of requests; from any thread.

    Args:
        vocab_size: tokens of the model's output layer, `V`; tokens that the tokenizer does not have are never allowed.

    Attributes:
        forbidden: makes the masks of texts in which a string never occurs, once for each string.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size, self._tenant = vocab_size, ""
        self.forbidden = cache(lambda text: ForbiddenText(text, tokenizer, vocab_size))
        self._vocabulary = cache(lambda: make_vocabulary(tokenizer, vocab_size))
        self._tokens = JsonTokens(tokenizer.token_bytes, vocab_size)
        self._kept = ExpiringEntries[TokenGrammar](Quota(MAX_COMPILED, MAX_COMPILED_BYTES), inf, monotonic)
        self._lock = threading.Lock()

    def of(self, tenant: str) -> "Grammars":
        """The same vocabulary for a tenant, whose grammars no other tenant finds: the time of a compilation would reveal
        them."""
        copied = copy(self)
        copied._tenant = tenant
        return copied

    @property
    def num_compiled_bytes(self) -> int:
        """Bytes of the grammars that are kept, as `limits.num_compiled_bytes` estimates them."""
        return self._kept.num_bytes

    def compile(self, grammar: GrammarSource) -> "TokenGrammar":
        """A grammar, compiled only if it is not among the tenant's last ones.

        Raises:
            RequestError: it is too long or invalid, repeats something too often, cannot be enforced, or matches no text that
                the vocabulary can write.
        """
        kind, text = grammar.source
        name = sha256(json.dumps([self._tenant, kind, text]).encode()).hexdigest()
        if (earlier := self._kept.use(name)) is not None:
            return earlier
        check_limits(kind, text)
        with self._lock:
            vocabulary = self._vocabulary()
        matcher = compile_matcher(vocabulary, self._vocab_size, kind, text)
        json_text = JsonText(self._tokens, whole=kind == "json", has_patterns="patternProperties" in text)
        compiled = TokenGrammar(matcher, self._vocab_size, json_text if kind in ("json", "lark") else None)
        self._kept.put(self._tenant, name, compiled, num_compiled_bytes(text))
        return compiled
