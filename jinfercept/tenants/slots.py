"""Slots for work, in which tenants take turns: for the threads of a server, and for the calls of a tool."""

import asyncio
from dataclasses import dataclass, field
from typing import final


@dataclass(slots=True)
class _TenantWork:
    """The work of one tenant: the number of its slots, and what waits for one in order of arrival."""

    running: int = 0
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict[asyncio.Future[None], None])


@final
class FairSlots:
    """Slots in which tenants take turns. Belongs to one event loop.

    A free slot goes to the tenant with the fewest slots; of several, to the one whose last work began or ended longest ago; of
    the work of this tenant, to the oldest.

    Args:
        most_of_tenant: slots that one tenant may have at a time; None: all.
    """

    def __init__(self, slots: int, most_of_tenant: int | None = None) -> None:
        self._free, self._most_of_tenant = slots, slots if most_of_tenant is None else most_of_tenant
        self._tenants: dict[str, _TenantWork] = {}  # with slots or waiting; last the one whose work began or ended last

    async def begin(self, tenant: str) -> None:
        """Wait for a slot and take it. Work that is cancelled while it waits takes none."""
        work = self._tenants.setdefault(tenant, _TenantWork())
        if self._free and work.running < self._most_of_tenant:
            self._take(tenant)
            return
        place = asyncio.get_running_loop().create_future()
        work.waiting[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(tenant, place)
            else:  # it has a slot already
                self.end(tenant)
            raise

    def end(self, tenant: str) -> None:
        self._free += 1
        self._count(tenant, -1)
        self._next()

    def close(self, error: Exception) -> None:
        """Fail all that waits."""
        for work in self._tenants.values():
            for place in work.waiting:
                if not place.done():
                    place.set_exception(error)
            work.waiting.clear()

    def _next(self) -> None:
        """Give a free slot to what waits next."""
        while (tenant := self._whose_turn()) is not None:
            waiting = self._tenants[tenant].waiting
            place = next(iter(waiting))
            del waiting[place]
            if not place.cancelled():
                self._take(tenant)
                place.set_result(None)
                return

    def _whose_turn(self) -> str | None:
        may_begin = (
            tenant for tenant, work in self._tenants.items() if work.waiting and work.running < self._most_of_tenant
        )
        return min(may_begin, key=lambda tenant: self._tenants[tenant].running, default=None)

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._count(tenant, 1)

    def _count(self, tenant: str, change: int) -> None:
        work = self._tenants.pop(tenant)
        work.running += change
        if work.running or work.waiting:
            self._tenants[tenant] = work

    def _leave(self, tenant: str, place: asyncio.Future[None]) -> None:
        if (work := self._tenants.get(tenant)) is not None:
            work.waiting.pop(place, None)
            if not work.running and not work.waiting:
                del self._tenants[tenant]
