"""Counts XLA's compilations, and how many of them the compilation cache on disk answered."""

from typing import final

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@final
class CompileCounter:
    """Counts XLA compilations of the process from its creation on: `count`, of which `cached` were found on disk."""

    def __init__(self) -> None:
        self.count = self.cached = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_for_hits)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILE_EVENT

    def _listen_for_hits(self, event: str, **_: str | int) -> None:
        self.cached += event == _CACHE_HIT_EVENT

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_for_hits)
