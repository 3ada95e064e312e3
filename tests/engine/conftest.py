"""An engine for all tests of a file that define none of their own."""

from collections.abc import Iterator

import pytest

from jinfercept import LLM
from tests.support.engine_state import settle
from tests.support.gate import closed_gate
from tests.support.tiny_model import tiny_llm


@pytest.fixture(scope="module")
def _tiny() -> Iterator[LLM]:
    with tiny_llm(kv_tokens=512, max_model_len=128) as llm:
        yield llm


@pytest.fixture
def llm(_tiny: LLM) -> Iterator[LLM]:
    _tiny.restart()
    yield _tiny
    settle(_tiny)


@pytest.fixture
def gated(llm: LLM) -> Iterator[LLM]:
    """The same; long requests do not end by themselves."""
    with closed_gate(llm, after=4):
        yield llm
        settle(llm)
