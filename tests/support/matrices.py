"""Which cases of a matrix of policies a default run has; the others are slow tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import POLICIES

SAMPLED = ("discard", "swap", "min_waste", "copy_ahead", "lru_host")
"""Policies of which every kind of move is one's: none, all out, by cost, ahead of the need, all through."""


def sampled_policies() -> Iterator[Any]:
    """Every policy with its number; by default those that are sampled."""
    for number, policy in enumerate(POLICIES):
        yield pytest.param(number, policy, marks=() if policy in SAMPLED else pytest.mark.slow, id=policy)


def sampled_names() -> Iterator[Any]:
    """Every policy; by default those that are sampled."""
    for policy in POLICIES:
        yield pytest.param(policy, marks=() if policy in SAMPLED else pytest.mark.slow)


def sampled_depths() -> Iterator[Any]:
    """Every policy at both depths of the pipeline; by default those that are sampled, each at one."""
    for number, policy in enumerate(POLICIES):
        for depth in (0, 1):
            default = policy in SAMPLED and depth == number % 2
            yield pytest.param(policy, depth, marks=() if default else pytest.mark.slow, id=f"{policy}, {depth}")
