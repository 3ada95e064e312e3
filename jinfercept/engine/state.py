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
    """An engine between two steps. The counts are copies: the engine does not change them."""

    counts: EngineCounts  # since the engine was first asked for its state
    counters: SchedulerCounters  # likewise
    pages: Pages
    num_device_pages: int
    num_host_pages: int
    num_running: int
    num_waiting: int  # includes the requests at the door
    num_at_door: int
    num_intercepted: int  # without retained contexts of finished requests
    num_retained: int
    has_work: bool
    quiescent: bool  # a step without new requests would move no page
    window_pages: SlotOccupancy | None = None  # of layers with windows; None if these have no pool of their own
    state_slots: SlotOccupancy | None = None  # for states of recurrent layers; None if the model has none

    @property
    def num_unfinished(self) -> int:
        return self.num_running + self.num_waiting + self.num_intercepted

    @classmethod
    def of(cls, engine: Engine, stats: EngineStats) -> Self:
        """The state now; call it between two steps."""
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
