"""Decision records: the policy's moves of every paused context, their reasons, and the waste predicted and measured.

A `DecisionLog` observes one scheduler and writes a JSON line for every decision and every ended interception. It queries an
estimator of its own, so that recording changes no decision (see `forecast.EstimatorTee`). The lines:

    run       the first line: version, names and numbers of the run, quantiles and ages of the forecasts
    decision  the moves of one context with one action and one reason, in one plan (state "running": copied before any pause);
              or action "keep", for a pause without any move (written when the context runs again, with the numbers of the
              pause's start)
    outcome   an ended interception: seconds from its start until its last call returned (`call_s`) and until the engine handled
              that (`duration_s`), forecasts at several ages, predicted and actual waste

Waste is in token·seconds. It is predicted once, at the first plan that drops a page from the device, or at the pause if none
does: what the pause has held until then, and `WasteEquations.predicted` for the rest.
"""

import heapq
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, final

from jinfercept.errors import ConfigError
from jinfercept.kv.context_state import ContextState
from jinfercept.meter.decisions import DecisionCase, WasteEquations
from jinfercept.meter.ledger import StepSeconds, StepTimer
from jinfercept.meter.prices import Prices
from jinfercept.meter.request_log import Ended, LogEvent, Moved, Passed, Paused, Queued, Started, Stepped
from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.waste import least_waste, preserve_waste, swap_waste
from jinfercept.sim.forecast import QUANTILES, EstimatorTee, forecast
from jinfercept.sim.pause_account import Decision, PauseAccount, Prediction
from jinfercept.sim.record_lines import decision_line, keep_line, outcome_line

VERSION = 1
AGES_S = (0.0, 1.0, 3.0, 10.0, 30.0)
"""Ages of an interception in seconds; at the first plan after each, its remaining seconds are forecast."""

_BUFFER_BYTES = 1 << 20


def _open(path: str | Path) -> TextIO:
    try:
        return Path(path).open("w", buffering=_BUFFER_BYTES, encoding="utf-8")
    except OSError as error:
        fix = "name a file in a folder that is there"
        raise ConfigError("a record cannot be written", got=error, fix=fix) from None


@final
class DecisionLog:
    """Writes decision records to a file: a fold over the engine's log. It stores nothing of finished requests.

    Args:
        path: file, overwritten.
        now: the engine's clock.
        known: cost model, saturation point, page size and estimator of the policy.
        estimator: a new one of the policy's kind, queried instead of the policy's own.
        synchronous: steps wait for transfers.
        run: names and numbers of the run, for the first line.

    Attributes:
        estimator: the one for the scheduler: it forwards calls to the policy's estimator and to the log's.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        now: Callable[[], float],
        inputs: PolicyInputs,
        estimator: Estimator,
        *,
        synchronous: bool,
        run: Mapping[str, Any],
    ) -> None:
        self._file = _open(path)
        self._now, self._own_estimator, self._page_size = now, estimator, inputs.page_size
        self.estimator = EstimatorTee(inputs.estimator, estimator, self._forecast_fresh)
        self._equations, self._cost, self._synchronous = WasteEquations(inputs), inputs.cost, synchronous
        self._timer = StepTimer(Prices(inputs.cost, inputs.page_size, synchronous=synchronous), now())
        self._running: dict[str, Sequence] = {}
        self._pauses: dict[str, PauseAccount] = {}
        self._recovering: dict[str, PauseAccount] = {}
        self._fresh: list[PauseAccount] = []  # the estimators do not know their calls yet
        self._running_moves: dict[str, PauseAccount] = {}  # stand for running contexts that this plan copies
        self._decisions: dict[tuple[int, Action, str], Decision] = {}
        # when to look at a pause again, a tie-break, and which of its ages that is
        self._due: list[tuple[float, int, int, PauseAccount]] = []
        self._num_due = 0
        self._context: int | None = None  # of the running, until they change
        self._last_queries = 0
        self._write({"type": "run", "version": VERSION, **run, "quantiles": QUANTILES, "ages_s": AGES_S})

    def fold(self, event: LogEvent) -> None:
        match event:
            case Moved():
                self._forecast_fresh()
                self._move(event)
            case Stepped():
                self._forecast_fresh()
                self._step(event)
            case Queued() | Started() | Paused() | Ended():
                self._forecast_fresh()
                self._context = None
                self._enter(event)
            case Passed():
                pass

    # -- events ----------------------------------------------------------------------------------------------------

    def _enter(self, event: Queued | Started | Paused | Ended) -> None:
        now, sequence = event.at_s, event.sequence
        pause = self._pauses.get(sequence.id)
        self._running.pop(sequence.id, None)
        match event:
            case Started():
                self._running[sequence.id] = sequence
                if pause is not None:
                    del self._pauses[sequence.id]
                    if pause.run_at(now):
                        self._recovering[sequence.id] = pause
                    else:  # no lost tokens are to be fetched or recomputed
                        self._end(pause)
            case Queued() if pause is not None:
                pause.return_at(now)
                pause.call_s = self._call_s(sequence)
            case Ended():
                self._leave(sequence, now)
                self._call_s(sequence)
            case Paused() | Queued(because="preempted"):
                self._leave(sequence, now)
                pause = PauseAccount(sequence, event.number, intercepted=isinstance(event, Paused), now=now)
                self._pauses[sequence.id] = pause
                if isinstance(event, Paused):
                    self.estimator.keep(call.key for call in sequence.calls)
                    self._fresh.append(pause)
            case Queued():
                pass

    def _move(self, event: Moved) -> None:
        move = event.move
        pause = self._pauses.get(move.sequence.id) or self._aside(move.sequence, event.number, event.at_s)
        run = event.run
        own, context = run.num_tokens if event.freed and not run.shared else 0, move.sequence.context
        is_lost = own and isinstance(context.side, ContextState) and not context.side.slots
        lost_state = round(context.side_cost) if is_lost else 0
        key = (id(pause), move.action, move.why)
        decision = self._decisions.get(key)
        if decision is None:
            case = self._case(pause, context.own_tokens + own, context.state_tokens + lost_state)
            pause.touch(case.at_s, case.context + case.state_tokens)
            decision = self._decisions[key] = Decision(pause, case, move.action, move.why)
        decision.pages += run.num_pages
        decision.tokens += run.num_tokens
        decision.copied += event.copied_tokens
        if event.freed:
            pause.lose(own + lost_state)
            if move.action is not Action.LOSE and (event.copied_tokens or run.residency.on_host):
                decision.freed_clean += run.num_tokens
            else:
                decision.freed_dirty += run.num_tokens

    def _step(self, event: Stepped) -> None:
        """Pay for a step. With pipeline depth 1, the moves of the plan that was made meanwhile are counted here too."""
        planned, now = event.planned, event.at_s
        plan = planned.plan
        seconds = self._timer.divide(planned, event.result, now)
        if plan.offload or plan.fetch:
            self._pay_stalls(plan, seconds.stall_s)
        self._flush(plan.number)
        if self._recovering:
            self._pay_recoveries(planned, seconds)
        while self._due and self._due[0][0] <= now:  # interceptions that have reached another age
            _, _, index, pause = heapq.heappop(self._due)
            if pause.returned_s is None and self._pauses.get(pause.sequence.id) is pause:
                self._forecast(pause, index, now)
        self._last_queries = plan.num_tokens
        self._context = None

    def close(self) -> None:
        """Write open decisions and interceptions as they are, and close the file."""
        if self._file.closed:
            return
        self._flush(None)
        for pause in [*self._pauses.values(), *self._recovering.values()]:
            pause.settle(self._now())
            self._end(pause)
        self._file.close()

    # -- pauses ----------------------------------------------------------------------------------------------------

    def _aside(self, sequence: Sequence, number: int, now: float) -> PauseAccount:
        """An account for moves of a context that runs, which is not paused."""
        if sequence.id not in self._running_moves:
            self._running_moves[sequence.id] = PauseAccount(sequence, number, intercepted=False, now=now)
        return self._running_moves[sequence.id]

    def _leave(self, sequence: Sequence, now: float) -> None:
        """End the open pause of a sequence as it is."""
        for pauses in (self._pauses, self._recovering):
            pause = pauses.pop(sequence.id, None)
            if pause is not None:
                pause.settle(now)
                self._end(pause)

    def _call_s(self, sequence: Sequence) -> float | None:
        """Seconds from the pause until the last of the sequence's calls returned; None if one of them was aborted."""
        ended = [(call, end) for call in sequence.calls if (end := self.estimator.take_ended(call.key)) is not None]
        if not all(end.clean for _, end in ended):
            return None
        return max((end.duration_s - call.head_start_s for call, end in ended), default=None)

    def _end(self, pause: PauseAccount) -> None:
        """A pause has ended: if it was an interception, write its outcome."""
        if not pause.intercepted or not pause.forecasts:  # it began when the log was closed
            return
        first = pause.forecasts[0]
        if pause.untouched:
            chunk = self._equations.chunk(self._last_queries)
            other_tokens, state = self._running_context(), pause.state_tokens
            case = DecisionCase(
                pause.began_s, State.INTERCEPTED, first.remaining_s, pause.context, other_tokens, chunk, state
            )
            self._write(keep_line(pause, case, self._equations.waste(case)))
        if pause.prediction is None:
            pause.prediction = Prediction(0.0, preserve_waste(first.remaining_s, pause.context + pause.state_tokens))
        self._write(outcome_line(pause, self._now()))

    def _forecast_fresh(self) -> None:
        """Forecast the interceptions that have just begun: the estimators know their calls now, and no end of one."""
        for pause in self._fresh:
            self._forecast(pause, 0, pause.began_s)
        self._fresh.clear()

    def _forecast(self, pause: PauseAccount, index: int, now: float) -> None:
        """Add a forecast to a pause, and schedule the one of its next age."""
        age_s = now - pause.began_s
        pause.forecasts.append(forecast(self._own_estimator, pause.sequence, age_s))
        coming = next((later for later in range(index + 1, len(AGES_S)) if AGES_S[later] > age_s), None)
        if coming is not None:
            self._num_due += 1
            heapq.heappush(self._due, (pause.began_s + AGES_S[coming], self._num_due, coming, pause))

    # -- decisions -------------------------------------------------------------------------------------------------

    def _case(self, pause: PauseAccount, context: int, state_tokens: int) -> DecisionCase:
        now, sequence, rest_s = self._now(), pause.sequence, None
        if sequence.state is State.INTERCEPTED:
            rest_s = remaining_s(self._own_estimator, sequence, now - pause.began_s)
        chunk = self._equations.chunk(self._last_queries)
        return DecisionCase(now, sequence.state, rest_s, context, self._running_context(), chunk, state_tokens)

    def _flush(self, plan: int | None) -> None:
        decisions = list(self._decisions.values())
        self._decisions.clear()
        self._running_moves.clear()
        for pause in {id(decision.pause): decision.pause for decision in decisions}.values():
            if pause.intercepted and pause.prediction is None:
                self._predict(pause, [decision for decision in decisions if decision.pause is pause])
        for decision in decisions:
            self._write(decision_line(decision, self._equations.waste(decision.case), plan))

    def _predict(self, pause: PauseAccount, decisions: list[Decision]) -> None:
        """Predict the waste of a pause whose first page has just been dropped."""
        case = decisions[0].case
        clean = sum(decision.freed_clean for decision in decisions)
        dirty = sum(decision.freed_dirty for decision in decisions)
        if clean + dirty and case.remaining_s is not None:
            token_s = pause.held + self._predicted(case, clean, dirty)
            pause.prediction = Prediction(case.at_s - pause.began_s, token_s)

    def _predicted(self, case: DecisionCase, clean: int, dirty: int) -> float:
        """Token·seconds from now on, if `clean` tokens with a host copy and `dirty` ones without leave the device.

        Equation (5) for the tokens that stay, since every iteration decides anew; (4) for the dirty ones; for the clean ones
        (3) if transfers are synchronous, else 0.
        """
        staying_tokens = case.context - clean - dirty
        rest = case._replace(context=staying_tokens, state_tokens=case.state_tokens if staying_tokens else 0)
        token_s = least_waste(self._equations.waste(rest))
        if dirty:
            token_s += self._equations.waste(case._replace(context=dirty)).discard
        if clean and self._synchronous:
            token_s += swap_waste(clean, case.others, self._cost.swap_s)
        return token_s

    # -- measured waste --------------------------------------------------------------------------------------------

    def _running_context(self) -> int:
        if self._context is None:
            self._context = sum([sequence.length for sequence in self._running.values()])
        return self._context

    def _pay_recoveries(self, planned: PlannedStep, seconds: StepSeconds) -> None:
        """Charge a step, without its stall, to the resumed contexts that wait for tokens."""
        sampled = {row.sequence.id for row in planned.sampled}
        step_s, recomputed = seconds.total_s - seconds.stall_s, planned.recomputed_tokens
        for name, pause in list(self._recovering.items()):
            sequence, tokens = pause.sequence, pause.take_recomputed()
            own = sequence.context.residency(sequence.max_computed).device
            if tokens:
                share_s = seconds.recompute_s * min(1.0, tokens / recomputed) if recomputed else 0.0
                pause.pay(recompute=step_s * own + share_s * (self._running_context() - sequence.length))
            elif name not in sampled:
                pause.pay(fetch=step_s * own)
            if name in sampled:
                del self._recovering[name]
                self._end(pause)

    def _pay_stalls(self, plan: StepPlan, stall_s: float) -> None:
        """Charge the seconds for which a step waited for the link, in proportion to the moved tokens."""
        moved = (len(plan.offload) + len(plan.fetch)) * self._page_size
        absent = sum(
            [
                p.sequence.length - p.sequence.context.residency(p.sequence.max_computed).device
                for p in self._recovering.values()
            ]
        )
        each = stall_s * (self._running_context() - absent) / moved
        for decision in self._decisions.values():
            decision.pause.pay(stall=each * decision.copied)
        for pause in self._recovering.values():
            pause.pay(stall=each * pause.take_copied_in())

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
