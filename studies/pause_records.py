"""What pauses wasted, beside what the equations predicted: a fold over the log of a simulated engine.

Waste is in token·seconds of device memory; only tokens that no other context shares count. It is predicted once, at the first
plan that drops a page from the device, or at the pause if none does: what the pause has held until then, and
the equations for the rest. Queries the policy's own estimator, as the policy does at every plan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from jinfercept.engine.meter.ledger import Prices, StepSeconds, StepTimer
from jinfercept.engine.meter.request_log import Ended, LogEvent, Moved, Paused, Queued, RequestLog, Started, Stepped
from jinfercept.kv.context import ContextState
from jinfercept.sched.estimator import remaining_s
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.waste import (
    Waste,
    chunk_tokens,
    chunked_discard_waste,
    least_waste,
    preserve_waste,
    swap_waste,
)

KEEP = "keep"
"""The action of a pause without any move."""


class DecisionCase(NamedTuple):
    """The inputs of a decision.

    Attributes:
        at_s: seconds of the engine's clock.
        state: the sequence's.
        remaining_s: predicted seconds until the return; None for a context that waits to run: (2) does not apply.
        context: C, tokens on the device that no other context shares.
        others: C_other, context tokens of the running sequences.
        chunk: tokens that a recomputation computes in one step.
        state_tokens: tokens that take as much memory as the context's state of recurrent layers.
    """

    at_s: float
    state: State
    remaining_s: float | None
    context: int
    others: int
    chunk: int
    state_tokens: int = 0


class PauseCost(NamedTuple):
    """Measured waste of a pause, in token·seconds. The seconds of a step divide as in `meter.ledger`.

    Attributes:
        kept: own tokens on the device, from the pause to the return; equation (2) predicts it.
        recompute: own tokens for the steps that recompute some of them, other running contexts for the growth of these steps;
            equation (4).
        fetch: own tokens for the other steps from admission to the next token, which wait for copies from the host; equation
            (5) takes a swap within the link budget as free.
        stall: contexts of all running sequences, for the seconds in which steps wait for this pause's copies; equation (3).
            These seconds are in none of the other parts.
        queued: own tokens on the device, from the return to admission. No equation has it.
    """

    kept: float
    recompute: float
    fetch: float
    stall: float
    queued: float

    @property
    def token_s(self) -> float:
        """The sum of the parts that equations predict: all but `queued`."""
        return self.kept + self.recompute + self.fetch + self.stall


class PauseRecord(NamedTuple):
    """An interception that has ended.

    Attributes:
        returned: False: it was aborted, or the run ended before.
        decided: by action, the inputs of the first decision and what the equations predict for it; in the order of time.
        predicted_token_s: see the module.
    """

    request: str
    returned: bool
    decided: Mapping[str, tuple[DecisionCase, Waste]]
    predicted_token_s: float
    cost: PauseCost


@dataclass(slots=True, eq=False)
class _Pause:
    """An open pause, an interception or a preemption. `resident`: own tokens on the device since `since_s`."""

    sequence: Sequence
    intercepted: bool
    began_s: float
    expected_s: float
    context: int
    state_tokens: int
    since_s: float
    resident: int
    recomputed: int
    copied_in: int
    kept: float = 0.0
    queued: float = 0.0
    recompute: float = 0.0
    fetch: float = 0.0
    stall: float = 0.0
    returned: bool = False
    predicted: float | None = None
    decided: dict[str, tuple[DecisionCase, Waste]] = field(default_factory=dict)

    def settle(self, now: float) -> None:
        """Add what the context has held until now."""
        token_s = self.resident * (now - self.since_s)
        self.since_s = now
        if self.returned:
            self.queued += token_s
        else:
            self.kept += token_s


@dataclass(slots=True)
class _Moves:
    """Moves of one paused context by one action for one reason in one plan, in tokens: copied, dropped with and without a host
    copy."""

    pause: _Pause
    case: DecisionCase
    copied: int = 0
    clean: int = 0
    dirty: int = 0


@final
class PauseRecords:
    """Records every interception of one engine.

    Args:
        log: of the engine; `fold` gets its events from now on.
        synchronous: steps wait for transfers.

    Attributes:
        ended: in the order of their ends.
    """

    def __init__(self, log: RequestLog, inputs: PolicyInputs, synchronous: bool) -> None:
        self._inputs, self._synchronous = inputs, synchronous
        self._now, self._running = log.now, log.running
        self._timer = StepTimer(Prices(inputs.cost, inputs.page_size, synchronous=synchronous), log.now())
        self._pauses: dict[str, _Pause] = {}
        self._recovering: dict[str, _Pause] = {}
        self._moves: dict[tuple[str, Action, str], _Moves] = {}
        self._last_queries = 0
        self.ended: list[PauseRecord] = []
        log.tell(self.fold)

    def fold(self, event: LogEvent) -> None:
        match event:
            case Moved():
                self._move(event)
            case Stepped():
                self._step(event)
            case Started(now, sequence):
                if (pause := self._pauses.pop(sequence.id, None)) is not None:
                    pause.settle(now)
                    pause.resident = 0
                    residency = sequence.context.residency(sequence.max_computed)
                    if residency.host + residency.missing:
                        self._recovering[sequence.id] = pause
                    else:
                        self._end(pause)
            case Queued(now, sequence, "returned") if sequence.id in self._pauses:
                pause = self._pauses[sequence.id]
                pause.settle(now)
                pause.returned = True
            case Paused(now, sequence) | Queued(now, sequence, "preempted"):
                self._leave(sequence, now)
                self._pauses[sequence.id] = self._opened(sequence, isinstance(event, Paused), now)
            case Ended(now, sequence):
                self._leave(sequence, now)
            case _:
                pass

    def close(self) -> None:
        """Record the open interceptions as they are."""
        self._predict()
        for sequence in [pause.sequence for pause in (*self._pauses.values(), *self._recovering.values())]:
            self._leave(sequence, self._now())

    def _opened(self, sequence: Sequence, intercepted: bool, now: float) -> _Pause:
        context, usage = sequence.context, sequence.usage
        expected_s = remaining_s(self._inputs.estimator, sequence, 0.0) if intercepted else 0.0
        own, state = context.own_tokens, context.state_tokens
        counted = (usage.recomputed, usage.copied_in)
        return _Pause(sequence, intercepted, now, expected_s, own, state, now, own + state, *counted)

    def _leave(self, sequence: Sequence, now: float) -> None:
        """End the open pause of a sequence as it is."""
        for pauses in (self._pauses, self._recovering):
            if (pause := pauses.pop(sequence.id, None)) is not None:
                pause.settle(now)
                self._end(pause)

    def _end(self, pause: _Pause) -> None:
        if not pause.intercepted:
            return
        if not pause.decided:
            case = self._case(pause, pause.context, pause.state_tokens)._replace(
                at_s=pause.began_s, remaining_s=pause.expected_s
            )
            pause.decided[KEEP] = (case, self._waste(case))
        predicted = pause.predicted
        if predicted is None:
            predicted = preserve_waste(pause.expected_s, pause.context + pause.state_tokens)
        cost = PauseCost(pause.kept, pause.recompute, pause.fetch, pause.stall, pause.queued)
        self.ended.append(PauseRecord(pause.sequence.id, pause.returned, pause.decided, predicted, cost))

    # -- decisions -------------------------------------------------------------------------------------------------

    def _move(self, event: Moved) -> None:
        move, run = event.move, event.run
        pause = self._pauses.get(move.sequence.id)
        if pause is None:  # a running context is copied
            return
        own, context = run.num_tokens if event.freed and not run.shared else 0, move.sequence.context
        is_lost = own and isinstance(context.side, ContextState) and not context.side.slots
        lost_state = round(context.side_cost) if is_lost else 0
        key = (move.sequence.id, move.action, move.why)
        moves = self._moves.get(key)
        if moves is None:
            case = self._case(pause, context.own_tokens + own, context.state_tokens + lost_state)
            pause.settle(case.at_s)
            pause.resident = case.context + case.state_tokens
            moves = self._moves[key] = _Moves(pause, case)
            if case.state is State.INTERCEPTED:
                pause.decided.setdefault(move.action.value, (case, self._waste(case)))
        moves.copied += event.copied_tokens
        if event.freed:
            pause.resident = max(0, pause.resident - own - lost_state)
            if move.action is not Action.LOSE and (event.copied_tokens or run.residency.on_host):
                moves.clean += run.num_tokens
            else:
                moves.dirty += run.num_tokens

    def _case(self, pause: _Pause, context: int, state_tokens: int) -> DecisionCase:
        now, sequence, rest_s = self._now(), pause.sequence, None
        if sequence.state is State.INTERCEPTED:
            rest_s = remaining_s(self._inputs.estimator, sequence, now - pause.began_s)
        chunk = chunk_tokens(self._inputs.saturation, self._last_queries, self._inputs.page_size)
        return DecisionCase(now, sequence.state, rest_s, context, self._running_context(), chunk, state_tokens)

    def _waste(self, case: DecisionCase) -> Waste:
        """Equations (2), (4) and (3) for the tokens on the device; (2) is NaN without a predicted return."""
        rest_s = math.nan if case.remaining_s is None else case.remaining_s
        inputs = self._inputs
        return Waste(
            preserve_waste(rest_s, case.context + case.state_tokens),
            chunked_discard_waste(case.context, case.others, case.chunk, inputs.forward_s, case.state_tokens),
            swap_waste(case.context, case.others, inputs.cost.swap_s),
        )

    def _predict(self) -> None:
        """Predict the waste of the pauses whose first pages this plan has dropped."""
        by_pause: dict[_Pause, list[_Moves]] = {}
        for moves in self._moves.values():
            by_pause.setdefault(moves.pause, []).append(moves)
        self._moves.clear()
        for pause, plan in by_pause.items():
            case, clean, dirty = plan[0].case, sum(moves.clean for moves in plan), sum(moves.dirty for moves in plan)
            if pause.intercepted and pause.predicted is None and clean + dirty and case.remaining_s is not None:
                pause.predicted = pause.kept + self._predicted(case, clean, dirty)

    def _predicted(self, case: DecisionCase, clean: int, dirty: int) -> float:
        """Token·seconds from now on, if `clean` tokens with a host copy and `dirty` ones without leave the device.

        Equation (5) for the tokens that stay, since every iteration decides anew; (4) for the dirty ones; for the clean ones
        (3) if transfers are synchronous, else 0.
        """
        staying_tokens = case.context - clean - dirty
        rest = case._replace(context=staying_tokens, state_tokens=case.state_tokens if staying_tokens else 0)
        token_s = least_waste(self._waste(rest))
        if dirty:
            token_s += self._waste(case._replace(context=dirty)).discard
        if clean and self._synchronous:
            token_s += swap_waste(clean, case.others, self._inputs.cost.swap_s)
        return token_s

    # -- measured waste --------------------------------------------------------------------------------------------

    def _running_context(self) -> int:
        return sum([sequence.length for sequence in self._running.values()])

    def _step(self, event: Stepped) -> None:
        """Pay for a step. With pipeline depth 1, the moves of the plan that was made meanwhile are counted here too."""
        planned = event.planned
        seconds = self._timer.divide(planned, event.result, event.at_s)
        if planned.plan.offload or planned.plan.fetch:
            self._pay_stalls(planned.plan, seconds.stall_s)
        self._predict()
        self._pay_recoveries(planned, seconds)
        self._last_queries = planned.plan.num_tokens

    def _pay_recoveries(self, planned: PlannedStep, seconds: StepSeconds) -> None:
        """Charge a step, without its stall, to the resumed contexts that wait for tokens."""
        sampled = {row.sequence.id for row in planned.sampled}
        step_s, recomputed = seconds.total_s - seconds.stall_s, planned.recomputed_tokens
        for name, pause in list(self._recovering.items()):
            sequence = pause.sequence
            tokens, pause.recomputed = sequence.usage.recomputed - pause.recomputed, sequence.usage.recomputed
            own = sequence.context.residency(sequence.max_computed).device
            if tokens:
                share_s = seconds.recompute_s * min(1.0, tokens / recomputed) if recomputed else 0.0
                pause.recompute += step_s * own + share_s * (self._running_context() - sequence.length)
            elif name not in sampled:
                pause.fetch += step_s * own
            if name in sampled:
                del self._recovering[name]
                self._end(pause)

    def _pay_stalls(self, plan: StepPlan, stall_s: float) -> None:
        """Charge the seconds for which a step waited for the link, in proportion to the moved tokens."""
        moved = (len(plan.offload) + len(plan.fetch)) * self._inputs.page_size
        absent = sum(
            [
                pause.sequence.length - pause.sequence.context.residency(pause.sequence.max_computed).device
                for pause in self._recovering.values()
            ]
        )
        each = stall_s * (self._running_context() - absent) / moved
        for moves in self._moves.values():
            moves.pause.stall += each * moves.copied
        for pause in self._recovering.values():
            usage = pause.sequence.usage
            tokens, pause.copied_in = usage.copied_in - pause.copied_in, usage.copied_in
            pause.stall += each * tokens
