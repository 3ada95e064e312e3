"""An LLM's engine as it is between two steps."""

from typing import Any

from jinfercept.engine.engine import Engine
from jinfercept.engine.state import EngineState
from jinfercept.events import Token
from jinfercept.llm import LLM
from jinfercept.sampling_params import SamplingParams
from tests.support.tool_runner import until


def engine_of(llm: LLM) -> Engine:
    """The engine that the LLM's thread steps; an engine that is restarted is another one."""
    return llm.engine._engine  # pyright: ignore[reportPrivateUsage]


def engine_state(llm: LLM) -> EngineState:
    """The state once the step that runs is over."""
    return llm.engine.snapshot().result(60)


PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def prompt(number: int) -> dict[str, Any]:
    return {"prompt_token_ids": [number % 100 + 1, 2, 3, number // 100 + 1]}


def settle(llm: LLM) -> None:
    """Nothing runs any more, and no page is held."""
    until(lambda: not engine_state(llm).num_unfinished)
    pages = engine_state(llm).pages
    assert (pages.used, pages.claimed_dirty + pages.claimed_clean) == (0, 0)


def tokens_of(events: list[Any]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]
