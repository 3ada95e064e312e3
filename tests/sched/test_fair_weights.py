"""Tenants with weights: shares of memory·time over the long run, what idle tenants leave to others, and that none starves."""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.engine.admission import check_request
from jinfercept.errors import RequestError
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.policy import preserve
from tests.support.scheduler_bench import SchedulerBench

PLANS = 500


@final
class Crowd:
    """Tenants that always have as many sequences waiting as are asked for, and the memory·time that each has used."""

    def __init__(
        self, weights: Mapping[str, float], seed: int, *, max_num_seqs: int = 16, num_pages: int = 200
    ) -> None:
        self.bench = SchedulerBench(
            preserve(), max_num_seqs=max_num_seqs, num_pages=num_pages, buckets=(4, 64), check=False
        )
        self.weights, self.rng, self.number = weights, Random(seed), 0
        self.used = Counter[str]()

    def play(self, plans: int, busy: str, waiting: int = 6) -> None:
        """So many plans; the tenants of `busy` have work all the time, the others get none."""
        scheduler = self.bench.scheduler
        for _ in range(plans):
            for tenant in busy:
                for _ in range(waiting - scheduler.num_waiting_of(tenant)):
                    self.number += 1
                    prompt, answer = self.rng.randint(4, 24), self.rng.randint(2, 24)
                    self.bench.add(str(self.number), prompt, answer, tenant, self.weights[tenant])
            for sequence in scheduler.running:
                self.used[sequence.tenant] += len(sequence.tokens)
            self.bench.step()

    def shares(self) -> dict[str, float]:
        """Memory·time of each tenant over its weight, as a share of what it would be if all were served alike."""
        total, weights = sum(self.used.values()), sum(self.weights[tenant] for tenant in self.used)
        return {tenant: used / total * weights / self.weights[tenant] for tenant, used in self.used.items()}


@settings(max_examples=3)
@given(
    weights=st.fixed_dictionaries({tenant: st.sampled_from([1.0, 2.0, 3.0, 5.0]) for tenant in "abc"}),
    seed=st.integers(0, 99),
    memory_bound=st.booleans(),
)
def test_tenants_that_always_have_work_hold_memory_as_their_weights_say(
    weights: Mapping[str, float], seed: int, memory_bound: bool
) -> None:
    crowd = Crowd(weights, seed, max_num_seqs=64 if memory_bound else 16, num_pages=80 if memory_bound else 800)
    crowd.play(PLANS, "abc")
    assert crowd.shares() == pytest.approx(dict.fromkeys("abc", 1.0), rel=0.15)


def test_what_an_idle_tenant_does_not_use_goes_to_the_others_as_their_weights_say() -> None:
    crowd = Crowd({"a": 4.0, "b": 2.0, "c": 1.0}, 0)
    crowd.play(100, "abc")
    crowd.play(60, "bc")
    crowd.used.clear()
    crowd.play(PLANS, "bc")
    assert crowd.shares() == pytest.approx({"b": 1.0, "c": 1.0}, rel=0.1)
    crowd.used.clear()
    crowd.play(PLANS, "abc")
    assert crowd.shares() == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0}, rel=0.12), "idle time is no credit"


def test_the_lightest_tenant_gets_its_share_where_that_is_less_than_one_sequence() -> None:
    crowd = Crowd({"h": 19.0, "l": 1.0}, 0, max_num_seqs=8)
    crowd.play(4 * PLANS, "hl")
    assert crowd.used["l"] / crowd.used.total() == pytest.approx(0.05, rel=0.3)


@settings(max_examples=3)
@given(weights=st.lists(st.floats(0.05, 20.0), min_size=2, max_size=5), seed=st.integers(0, 9))
def test_no_tenant_starves(weights: list[float], seed: int) -> None:
    crowd = Crowd({chr(97 + number): weight for number, weight in enumerate(weights)}, seed, max_num_seqs=6)
    tenants = "".join(crowd.weights)
    first = {tenant: crowd.bench.add(f"first {tenant}", 12, 12, tenant, crowd.weights[tenant]) for tenant in tenants}
    crowd.play(2 * PLANS, tenants, waiting=3)
    crowd.bench.drain()
    assert all(sequence.generated == 12 for sequence in first.values())


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    request = Request("a", (1, 2), SamplingParams(), weight=weight)
    with pytest.raises(RequestError, match="weight"):
        check_request(request, 10, 100)
