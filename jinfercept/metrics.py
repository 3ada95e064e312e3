"""Counts that prove things about a process: how often XLA compiled."""

from typing import final

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@final
class CompileCounter:
    """Counts XLA compilations of the process from its creation on, persistent-cache hits included."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILE_EVENT

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
