"""Reads the file of API keys again when it changes. A file that cannot be used changes nothing, and is named in the log."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from jinfercept.errors import ConfigError
from jinfercept.server.access.key_file import KeyRules
from jinfercept.server.options import ServerOptions

log = logging.getLogger("jinfercept.server")

POLL_S = 2.0
"""Seconds between two looks at the file."""


class ChecksKeys(Protocol):
    """What has API keys: the service of a server, or the front of a fleet."""

    options: ServerOptions

    def use_key_rules(self, rules: Mapping[str, KeyRules]) -> str:
        """Use other rules of the keys from now on; returns the names of keys whose rules changed, with commas."""
        ...


async def watch_key_file(service: ChecksKeys) -> None:
    """Follow the file of `--api-key-file` until cancelled; returns at once if there is none."""
    path = service.options.api_key_file
    if path is None:
        return
    seen = await asyncio.to_thread(_mark, path)
    await _read(service, path)  # it may have changed since the server read it
    while True:
        await asyncio.sleep(POLL_S)
        mark = await asyncio.to_thread(_mark, path)
        if mark != seen:
            seen = mark
            await _read(service, path)


async def _read(service: ChecksKeys, path: str) -> None:
    try:
        rules = await asyncio.to_thread(service.options.key_rules)
    except ConfigError as error:  # its text has no secrets
        log.error("the changed file of API keys is not used, the old rules hold: %s: %s", path, error)
        return
    if changed := service.use_key_rules(rules):
        log.info("the file of API keys was read again: %s", changed)


def _mark(path: str) -> tuple[int, int, int] | None:
    """What differs when a file was written or replaced; None if it is not there."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
