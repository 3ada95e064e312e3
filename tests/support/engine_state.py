"""An LLM's engine as it is between two steps."""

from jinfercept.engine.state import EngineState
from jinfercept.llm import LLM


def engine_state(llm: LLM) -> EngineState:
    """The state once the step that runs is over."""
    return llm.engine.snapshot().result(60)
