"""The rules of API keys, and the file of `--api-key-file` that declares them.

```toml
[team-a]
key = "a long random text"       # or its digest: sha256 = "…"

[nightly]
sha256 = "1f5e…"
priority = [5, 10]               # range of its requests' priority; a value outside becomes the nearer end
weight = 0.5                     # its share of memory·time while other keys have work too; 1 is the usual one
max_concurrent = 8               # requests in progress
requests_per_minute = 60
tokens_per_minute = 100_000      # of prompts and answers

[admin]
key = "another long random text"
operator = true
```
"""

import hashlib
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jinfercept.errors import ConfigError

MOST_PRIORITY = 2**31 - 1
_NAME = re.compile(r"[\w.-]{1,64}")
_FIX = (
    "give each key a table [NAME] with key or sha256, and optionally operator, priority = [LEAST, MOST], weight, "
    "max_concurrent, requests_per_minute and tokens_per_minute"
)
MOST_WEIGHT = 1e6

Limit = Annotated[int, Field(ge=1, le=MOST_PRIORITY)]
Priority = Annotated[int, Field(ge=-MOST_PRIORITY - 1, le=MOST_PRIORITY)]


class KeyRules(BaseModel):
    """The permissions of one API key. A limit of None is none.

    Attributes:
        operator: whether it sees the requests of all keys, and answers the calls of all in the inbox.
        priority: smallest and largest priority of its requests; smaller ones are served first, across keys.
        weight: while several keys have work, they share memory·time as their weights.
        max_concurrent: requests in progress.
        requests_per_minute, tokens_per_minute: limits on average; a minute's worth may come at once.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = ""
    operator: bool = False
    priority: Annotated[tuple[Priority, Priority], Field(strict=False)] = (0, MOST_PRIORITY)
    weight: Annotated[float, Field(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT, allow_inf_nan=False)] = 1.0
    max_concurrent: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class _Table(KeyRules):
    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> "_Table":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        if self.key is not None and self.key != self.key.strip():
            raise ValueError("a key must not begin or end with a blank")
        if self.sha256 == key_digest(""):
            raise ValueError("sha256 is the digest of an empty key")
        if self.priority[0] > self.priority[1]:
            raise ValueError("priority must be a list of two numbers, [LEAST, MOST]")
        return self


def key_digest(key: str) -> str:
    """SHA-256 of a key in hexadecimal digits: the server stores only this, and uses it as the name of the tenant."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_key_file(path: str) -> dict[str, KeyRules]:
    """The rules of a file's keys by `key_digest`. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            "the file of API keys cannot be read", got=f"{path}: {error}", fix="give a TOML file"
        ) from error
    if not tables:
        raise ConfigError("the file of API keys names no key", got=path, fix=_FIX)
    listed = [_rules(path, name, table) for name, table in tables.items()]
    twice = [digest for digest, number in Counter(digest for digest, _ in listed).items() if number > 1]
    if twice:
        names = ", ".join(rules.name for digest, rules in listed if digest == twice[0])
        raise ConfigError("two API keys are the same", got=f"{path}: {names}", fix="give each its own")
    return dict(listed)


def _rules(path: str, name: str, table: Any) -> tuple[str, KeyRules]:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a name of an API key is 1 to 64 letters, digits, _, . or -", got=f"{path}: {name[:80]!r}", fix="rename it"
        )
    if not isinstance(table, dict):
        raise ConfigError("the file of API keys has a value outside of any table", got=f"{path}: {name}", fix=_FIX)
    try:
        entry = _Table.model_validate(table | {"name": name})
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        message = f"{path}: [{name}] {field}: {problem['msg']}" if field else f"{path}: [{name}] {problem['msg']}"
        raise ConfigError("the file of API keys is wrong", got=message, fix=_FIX) from None  # its input is a secret
    digest = entry.sha256 if entry.key is None else key_digest(entry.key)
    assert digest is not None
    return digest, KeyRules(**entry.model_dump(exclude={"key", "sha256"}))
