"""The lines of decision records as JSON values; `sim.decision_records` says what they mean."""

import math
from collections.abc import Mapping
from typing import Any

from jinfercept.meter.decisions import DecisionCase
from jinfercept.sched.waste import Waste
from jinfercept.sim.pause_account import Decision, PauseAccount


def decision_line(decision: Decision, waste: Waste, plan: int | None) -> dict[str, Any]:
    """The record of a decision, with the waste that the equations predict; `plan` is the number of its plan."""
    return _about(decision.pause, decision.case, waste) | {
        "plan": plan,
        "action": decision.action.value,
        "why": decision.why,
        "pages": decision.pages,
        "tokens": decision.tokens,
        "copied_tokens": decision.copied,
        "freed_tokens": decision.freed_clean + decision.freed_dirty,
        "lost_tokens": decision.freed_dirty,
    }


def keep_line(pause: PauseAccount, case: DecisionCase, waste: Waste) -> dict[str, Any]:
    """The record of a pause without any move."""
    return _about(pause, case, waste) | {"plan": None, "action": "keep", "why": "nothing was done"}


def outcome_line(pause: PauseAccount, now: float) -> dict[str, Any]:
    """The record of an ended interception."""
    assert pause.prediction is not None
    cost, returned = pause.cost, pause.returned_s is not None
    return {
        "type": "outcome",
        "request": pause.sequence.id,
        "interception": pause.number,
        "tools": _tools(pause),
        "began_s": _short(pause.began_s),
        "returned": returned,
        "duration_s": _short((now if pause.returned_s is None else pause.returned_s) - pause.began_s),
        "call_s": None if pause.call_s is None else _short(pause.call_s),
        "context": pause.context,
        "found": None if pause.resumed is None else pause.resumed._asdict(),
        "recomputed_tokens": pause.recomputed,
        "predicted_at_age_s": _short(pause.prediction.age_s),
        "predicted_token_s": _short(pause.prediction.token_s),
        "actual_token_s": _short(cost.token_s),
        "actual": _all_short(cost._asdict()),
        "forecasts": [
            {"age_s": _short(age_s), "remaining_s": _short(rest_s), "quantiles_s": [*map(_short, quantiles_s)]}
            for age_s, rest_s, quantiles_s in pause.forecasts
        ],
    }


def _tools(pause: PauseAccount) -> list[str]:
    return [call.name for call in pause.sequence.calls]


def _short(value: float) -> float | None:
    """A number rounded to six decimals; None if it is not finite, which JSON cannot hold."""
    return round(value, 6) if math.isfinite(value) else None


def _all_short(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _short(value) for name, value in values.items()}


def _about(pause: PauseAccount, case: DecisionCase, waste: Waste) -> dict[str, Any]:
    return {
        "type": "decision",
        "at_s": _short(case.at_s),
        "request": pause.sequence.id,
        "interception": pause.number,
        "tools": _tools(pause),
        "state": case.state.value,
        "age_s": _short(case.at_s - pause.began_s),
        "remaining_s": None if case.remaining_s is None else _short(case.remaining_s),
        "context": case.context,
        "others": case.others,
        "chunk": case.chunk,
        "waste": _all_short(waste._asdict()),
    }
