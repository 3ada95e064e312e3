"""An engine's numbers between two steps, as frozen values."""

import copy
from dataclasses import dataclass
from typing import Self

from jinfercept.engine.engine import Engine
from jinfercept.engine.meter.counts import EngineCounts
from jinfercept.engine.meter.engine_stats import EngineStats, Pages
from jinfercept.kv.page import SlotOccupancy
from jinfercept.sched.plan_builder import SchedulerCounters


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine between two steps. The counts are copies: the engine does not change them.

    Attributes:
        counts: what was counted since the engine was first asked for its state.
        counters: what the scheduler did since then.
        pages: pages by residency.
        num_device_pages: pages of the device's pool.
        num_host_pages: pages of the host's pool.
        num_running: requests that are computed.
        num_waiting: requests that wait for their turn, those at the door too.
        num_at_door: those that wait at the door.
        num_intercepted: requests that are paused.
        num_retained: retained contexts of finished requests.
        has_work: whether any request is not finished.
        quiescent: whether a step without requests would move no page.
        window_pages: device slots of the pool of layers with windows; None where these have none of their own.
        state_slots: device slots for states of recurrent layers; None where the model has none.
    """

    counts: EngineCounts
    counters: SchedulerCounters
    pages: Pages
    num_device_pages: int
    num_host_pages: int
    num_running: int
    num_waiting: int
    num_at_door: int
    num_intercepted: int
    num_retained: int
    has_work: bool
    quiescent: bool
    window_pages: SlotOccupancy | None = None
    state_slots: SlotOccupancy | None = None

    @property
    def num_unfinished(self) -> int:
        """Requests that run, wait or are paused."""
        return self.num_running + self.num_waiting + self.num_intercepted

    @classmethod
    def of(cls, engine: Engine, stats: EngineStats) -> Self:
        """The state now. To be asked between two steps."""
        kv = engine.scheduler.kv
        occupancy, side = kv.occupancy(), kv.side_pool
        slots = None if side is None else side.occupancy()
        return cls(
            counts=stats.read(),
            counters=copy.copy(engine.scheduler.counters),
            pages=stats.pages(),
            num_device_pages=occupancy.total,
            num_host_pages=occupancy.host_total,
            num_running=len(stats.running),
            num_waiting=engine.num_waiting,
            num_at_door=len(engine.scheduler.door.sequences),
            num_intercepted=len(engine.scheduler.intercepted) - engine.num_retained,
            num_retained=engine.num_retained,
            has_work=engine.has_work,
            quiescent=engine.quiescent,
            window_pages=slots if side is not None and side.has_windows else None,
            state_slots=slots if side is not None and side.has_states else None,
        )
