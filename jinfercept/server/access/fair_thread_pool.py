"""Threads that prepare requests for the engine: they read large bodies, render, tokenise and compile grammars.

Light and heavy jobs, by the size of their input, have separate pools, so that long texts never delay short ones.
"""

from collections.abc import Callable
from typing import final

from jinfercept.state.tenant_pool import TenantPool

HEAVY_BYTES = 2**16
"""Input of the largest light job. A larger one takes a tenth of a second and more."""


@final
class FairThreadPool:
    """The preparation threads of a server.

    Args:
        max_waiting: jobs that one tenant may have waiting in each pool.
    """

    def __init__(self, max_waiting: int) -> None:
        self._light = TenantPool("light", num_threads=4, per_tenant=3, max_waiting=max_waiting)
        self._heavy = TenantPool("heavy", num_threads=2, per_tenant=1, max_waiting=max_waiting)

    async def run[T](self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs a function in a thread, see `TenantPool.run`."""
        pool = self._heavy if num_bytes > HEAVY_BYTES else self._light
        return await pool.run(tenant, num_bytes, work)

    def close(self) -> None:
        """Fail all waiting and running jobs, see `TenantPool.close`."""
        self._light.close()
        self._heavy.close()
