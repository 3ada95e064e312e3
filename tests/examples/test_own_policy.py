"""The example policy keeps the rules of policies, is short, and better than `lru`."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples import own_policy
from jinfercept.sched.estimator import make_estimator
from jinfercept.sched.sequence import PendingCall
from jinfercept.sim.own_workload import OwnWorkload
from jinfercept.testing import check_policy
from tests.support.docs_blocks import blocks_of

EXAMPLES = Path(own_policy.__file__).parent


def test_the_first_example_keeps_the_rules() -> None:
    check_policy(f"{EXAMPLES / 'own_policy.py'}:LastBackFirst")


def test_the_first_example_is_short_and_better_than_lru(capsys: pytest.CaptureFixture[str]) -> None:
    latencies = own_policy.main(40.0)
    assert latencies["LastBackFirst"] < latencies["lru"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len((EXAMPLES / "own_policy.py").read_text().splitlines()) < 60


def test_what_the_page_shows_can_be_used() -> None:
    names: dict[str, Any] = {}
    for block in blocks_of("own_policy.md"):
        if block.language == "python" and "LLM(" not in block.code:
            exec(block.code, names)
    call = PendingCall("search", 1)
    estimator = make_estimator(names["Mean"])
    assert estimator.remaining_s(call, 0.25) == 0.75
    estimator.observe(call, 4.0)
    assert estimator.remaining_s(call, 1.0) == 3.0
    assert OwnWorkload(names["browsing"], 4096).drawer(Random(1))().calls == 3
    assert names["check_policy"] is check_policy
    check_policy("copy_ahead", names["Smallest"])
