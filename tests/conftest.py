"""Shared set-up: deterministic property tests, the tests' own folder on the path, and one embedded model for all."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from jinfercept.llm import LLM

settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def _smollm2() -> "Iterator[LLM]":
    from jinfercept.llm import LLM

    with LLM(
        "smollm2-135m", dtype="float32", kv_tokens=1920, max_num_seqs=20, max_num_batched_tokens=64, quiet=True
    ) as llm:
        yield llm


@pytest.fixture
def smollm2(_smollm2: "LLM") -> "LLM":
    """SmolLM2 in float32 with a pool of 1,920 tokens, empty, under the policy `preserve`."""
    _smollm2.restart(policy="preserve")
    return _smollm2
