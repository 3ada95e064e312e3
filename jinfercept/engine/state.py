"""An engine's numbers between two steps: frozen counts, and the state for the live page, which shows the pool over time,
running requests, paused ones with their prices, and decisions.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from jinfercept.engine.engine import Engine
from jinfercept.engine.meter.counts import EngineCounts
from jinfercept.engine.meter.engine_stats import DecisionEntry, EngineStats, OpenInterception, Pages, PoolSample
from jinfercept.kv.page import Residency, SlotOccupancy
from jinfercept.sched.estimator import remaining_s
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.waste import chunk_tokens, chunked_discard_waste, preserve_waste


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


SHOWN = 30
"""Requests of each kind that are shown; all are counted."""

SHOWN_DECISIONS = 40
"""Decisions that are shown."""


def live_state(stats: EngineStats, *, texts: bool, tenant: str | None = None) -> dict[str, Any]:
    """The state as JSON values, the latest pause first. Seconds are ages or, named `at_s`, of the engine's clock.

    Queries the policy's estimator, as the policy does at every plan.

    Args:
        stats: read between two steps.
        texts: show calls and ends of answers.
        tenant: the tenant whose requests are counted and shown; None: all. The pool and the price of a recomputation, which
            delays all running requests, are those of all tenants in either case.
    """
    now = stats.now()
    running = _of(stats.running.values(), tenant)
    waiting = _of(stats.waiting.values(), tenant)
    at_door = _of(stats.at_door, tenant)
    paused = [pause for pause in reversed(stats.interceptions.open.values()) if tenant in (None, pause.sequence.tenant)]
    intercepted = [pause for pause in paused if not pause.kept and pause.returned_s is None]
    retained = [pause for pause in paused if pause.kept and pause.returned_s is None]
    decisions = (decided for decided in reversed(stats.decisions) if tenant in (None, decided.tenant))
    other_tokens = sum([sequence.length for sequence in stats.running.values()])
    return {
        "now_s": now,
        "page_size": stats.kv.page_size,
        "link_tokens_per_s": stats.inputs.cost.link_tokens(1.0),
        "counts": {
            "running": len(running),
            "waiting": len(waiting),
            "at_door": len(at_door),
            "intercepted": len(intercepted),
            "retained": len(retained),
        },
        "sample": _point(stats.sample()),
        "history": [_point(sample) for sample in stats.history],
        "running": [_runs(sequence, now) for sequence in running[:SHOWN]],
        "waiting": [_runs(sequence, now) for sequence in waiting[:SHOWN]],
        "at_door": [_runs(sequence, now) | {"place": place} for place, sequence in enumerate(at_door[:SHOWN], 1)],
        "intercepted": [_paused(stats, pause, now, other_tokens, texts) for pause in intercepted[:SHOWN]],
        "retained": [_paused(stats, pause, now, other_tokens, texts) for pause in retained[:SHOWN]],
        "decisions": [_decided(decided, now) for decided in islice(decisions, SHOWN_DECISIONS)],
    }


def _of(sequences: Iterable[Sequence], tenant: str | None) -> list[Sequence]:
    return [sequence for sequence in sequences if tenant in (None, sequence.tenant)]


def _decided(decided: DecisionEntry, now: float) -> dict[str, Any]:
    return {
        "age_s": now - decided.at_s,
        "request": decided.request_id,
        "tool": decided.tool,
        "state": decided.state,
        "action": decided.action,
        "why": decided.why,
        "copied_tokens": decided.copied_tokens,
        "freed_pages": decided.freed_pages,
    }


def _point(sample: PoolSample) -> dict[str, Any]:
    return sample._asdict() | {"pages": sample.pages._asdict()}


def _runs(sequence: Sequence, now: float) -> dict[str, Any]:
    return {
        "request": sequence.id,
        "session": sequence.session,
        "age_s": now - sequence.arrival_s,
        "tokens": sequence.length,
        "generated": sequence.generated,
        "computed": min(sequence.max_computed, sequence.length),
        "preemptions": sequence.preemptions,
    }


def _paused(stats: EngineStats, pause: OpenInterception, now: float, other_tokens: int, texts: bool) -> dict[str, Any]:
    sequence, age_s, inputs = pause.sequence, now - pause.began_s, stats.inputs
    rest_s = remaining_s(inputs.estimator, sequence, age_s)
    places, own, alone = _places(sequence)
    chunk = chunk_tokens(inputs.saturation, stats.last_queries, inputs.page_size)
    state_tokens = sequence.context.state_tokens
    # token·seconds that keeping the context, or dropping its dirty pages, would waste
    price = {
        "per_s": own + state_tokens,
        "preserve": preserve_waste(rest_s, own + state_tokens),
        "discard": chunked_discard_waste(alone, other_tokens, chunk, inputs.forward_s, state_tokens),
    }
    return {
        "request": sequence.id,
        "session": sequence.session,
        "tool": pause.tool,
        "tools": [call.name for call in sequence.calls],
        "age_s": age_s,
        "remaining_s": rest_s,
        "tokens": len(sequence.tokens),
        **places,
        "price": price,
    } | ({"text": pause.text} if texts else {})


def _places(sequence: Sequence) -> tuple[dict[str, int], int, int]:
    # Returns the tokens by place; of those on the device, the ones that no other context shares; of these, the dirty ones.
    places, own = {residency.value: 0 for residency in Residency}, dict.fromkeys(Residency, 0)
    for run in sequence.context.runs():
        places[run.residency.value] += run.num_tokens
        own[run.residency] += 0 if run.shared else run.num_tokens
    places["missing"] = max(0, sequence.max_computed - places["dirty"] - places["clean"] - places["host"])
    return places, own[Residency.DIRTY] + own[Residency.CLEAN], own[Residency.DIRTY]
