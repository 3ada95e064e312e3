"""Requests for the engine on fakes, and ways to step it to where a test wants it."""

from collections.abc import Callable
from typing import Any

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.engine import Engine
from jinfercept.events import Event, Finished
from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.policy import Policy
from jinfercept.sched.sequence import State
from tests.support.fake_engine import (
    POLICIES,
    InstantDispatcher,
    ManualClock,
    make_engine,
)


def ask(name: str, prompt: list[int], max_tokens: int = 5, **fields) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0), **fields)


def served(engine: Engine, *requests: Request) -> list[RequestOutput]:
    """Their outputs; what is kept stays kept."""
    outputs: dict[str, RequestOutput] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(5_000):
        if not engine.has_work:
            break
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    assert not engine.has_work
    return [outputs[request.id] for request in requests]


def settle(engine: Engine) -> None:
    while not engine.quiescent:
        engine.step()


def stream(output: RequestOutput) -> list[int]:
    return output.prompt_token_ids + output.outputs[0].token_ids


def policy(name: str):
    return POLICIES[name]()


TOOLS = {"tool": Tool(str, name="tool", max_result_tokens=50), "short": Tool(str, name="short", max_result_tokens=3)}
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def request(
    name: str, prompt: list[int], max_tokens: int = 8, calls: dict[int, list[int]] | None = None, **more: Any
) -> Request:
    """A greedy request that calls after so many generated tokens and gets these tokens back."""
    script = {count: [Call("tool", ",".join(map(str, tokens)))] for count, tokens in (calls or {}).items()}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    values: dict[str, Any] = {"tools": TOOLS, "detector": ScriptedDetector(script)} | more
    return Request(name, tuple(prompt), values.pop("params", params), **values)


def tokens_in(call: Call) -> Result:
    return Result("", token_ids=tuple(int(token) for token in call.arguments.split(",") if token))


def at_once(call: Call) -> float:
    return 0.0


def serve(
    policy: Policy,
    *,
    latency: Callable[[Call], float] = at_once,
    answer: Callable[[Call], Result] = tokens_in,
    **options: Any,
) -> Engine:
    clock = ManualClock()
    return make_engine(policy, clock=clock, dispatcher=InstantDispatcher(clock, latency, answer), **options)


def only(outputs: dict[str, RequestOutput]) -> CompletionOutput:
    ((output,),) = (done.outputs for done in outputs.values())
    return output


def steps(engine: Engine, number: int = 1) -> list[Event]:
    return [event for _ in range(number) for event in engine.step()]


def until(engine: Engine, reached: Callable[[], bool], most_steps: int = 1000) -> list[Event]:
    events: list[Event] = []
    for _ in range(most_steps):
        if reached():
            return events
        events += engine.step()
    raise AssertionError("this state is never reached")


def state_of(engine: Engine, name: str) -> State | None:
    return next((sequence.state for sequence in engine.scheduler.unfinished if sequence.id == name), None)
