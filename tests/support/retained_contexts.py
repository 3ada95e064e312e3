"""Requests whose contexts are kept, served one after another on an engine without a model."""

from jinfercept.engine.engine import Engine
from jinfercept.events import Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from tests.support.fake_engine import POLICIES


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
