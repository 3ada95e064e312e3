"""Forecasts of first tokens, and refusals: what a new request waits for, what is learned, and goodput past saturation."""

from random import Random
from statistics import fmean

import pytest

from jinfercept.sched.first_token import FirstTokenAdmission, first_token_s
from jinfercept.sched.load import EngineLoad, MeanRun, QueuedWork
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.policy import preserve
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import Script, Segment
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SchedulerBench

COST = AffineCost(fixed_s=0.1, per_query_s=0.0, link_tokens_per_s=1e9)
STEP = 100
MEANS = MeanRun(generated=20.0, computed=50.0, new=1.0)
ASKED = QueuedWork("a", 1.0, 0, 50, 50)
IDLE = EngineLoad(0, 0, 0, {}, 1000, 8, (), MEANS)
FULL = IDLE._replace(num_running=10, running_tokens=1000, running_by_tenant={"a": (1000.0, 10)}, free_tokens=0)


def seconds(load: EngineLoad, work: QueuedWork = ASKED) -> float:
    return first_token_s(COST, STEP, load, work)


def test_a_request_waits_for_the_prompts_before_it_and_for_its_own() -> None:
    assert seconds(IDLE) == pytest.approx(0.15), "half of the running step, and its own"
    waiting = IDLE._replace(queued=[ASKED] * 4)
    assert seconds(waiting) == pytest.approx(0.05 + 3 * 0.1), "250 tokens in steps of 100"
    follow_up = ASKED._replace(num_tokens=500)
    assert seconds(IDLE, follow_up) < seconds(IDLE, follow_up._replace(uncomputed=500)), "a held context is cheaper"


def test_memory_comes_free_as_runs_end() -> None:
    assert seconds(FULL) == pytest.approx(0.05 + 0.1 + 0.2), "one of ten runs of 20 steps ends every other step"
    assert seconds(FULL._replace(queued=[ASKED] * 9)) == pytest.approx(0.05 + 0.1 + 10 * 0.2)
    returning = FULL._replace(means=MEANS._replace(new=0.25))
    assert seconds(returning) == pytest.approx(0.05 + 0.1 + 4 * 0.2), "three of four places go to those that return"
    assert seconds(FULL._replace(free_tokens=1000, free_slots=0)) == seconds(FULL), "slots are waited for as well"


def test_of_other_tenants_as_much_goes_before_as_is_served_meanwhile() -> None:
    greedy = FULL._replace(
        queued=[ASKED._replace(tenant="greedy")] * 100, running_by_tenant={"greedy": (900.0, 9), "a": (900.0, 9)}
    )
    shared_s = seconds(greedy)
    assert shared_s == pytest.approx(seconds(FULL._replace(queued=[ASKED])), rel=0.01)
    assert seconds(greedy, ASKED._replace(weight=4.0)) < shared_s < seconds(greedy, ASKED._replace(weight=0.25))
    assert seconds(greedy, ASKED._replace(priority=-1)) < shared_s
    alone = greedy._replace(running_by_tenant={"greedy": (1000.0, 10)})
    assert seconds(alone) == pytest.approx(0.05 + 2 * 0.1), "a tenant that runs nothing takes a place at once"


def test_an_idle_engine_refuses_nothing_and_a_busy_one_says_when_to_come_again() -> None:
    admission = FirstTokenAdmission(COST, STEP)
    assert admission.decide(IDLE, ASKED, 0.001).retry_s is None
    late = admission.decide(FULL._replace(queued=[ASKED] * 99), ASKED, 2.0)
    assert late.forecast_s == pytest.approx(20.15)
    assert late.retry_s == pytest.approx(20.15 - 2.0 / 1.5), (
        "half as late again may happen, so long as nothing is learned"
    )


def test_a_tenants_errors_are_learned_and_are_no_other_tenants() -> None:
    admission, load = FirstTokenAdmission(COST, STEP), FULL._replace(queued=[ASKED] * 9)
    before = admission.decide(load, ASKED, 20.0)
    for number in range(200):
        admission.began(f"{number}", "a", before, 20.0)
        admission.ended(f"{number}", 3.0 * before.raw_s if number % 2 else 2.0 * before.raw_s)
    after = admission.decide(load, ASKED, 20.0)
    assert after.forecast_s == pytest.approx(2.5 * before.forecast_s, rel=0.05)
    assert admission.decide(load, ASKED, 2.9 * before.raw_s).retry_s is not None
    assert admission.decide(load, ASKED, 3.1 * before.raw_s).retry_s is None
    other = ASKED._replace(tenant="b")
    assert admission.decide(load, other, 20.0) == FirstTokenAdmission(COST, STEP).decide(load, other, 20.0)
    admission.began("gone", "a", before, 20.0)
    admission.ended("gone", None)
    admission.ended("never asked", 1.0)
    assert admission.decide(load, ASKED, 20.0) == after


def test_runs_are_counted_through_preemptions() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2)
    for name in "ab":
        bench.add(name, 4, max_tokens=6, tenant="many")
    bench.steps(3)
    bench.add("c", 4, max_tokens=6, tenant="one")
    bench.drain()
    assert bench.scheduler.counters.preemptions
    totals = bench.scheduler.means.mean_run
    assert (totals.generated, totals.computed, totals.new) == (6.0, 4.0, 1.0)


# -- under load --------------------------------------------------------------------------------------------------------


def overloaded(rate: float, limit_s: float | None, until_s: float = 8.0) -> Report:
    """Plain requests, of which the paper's GPU carries about 40 a second."""
    rng = Random(0)

    def script() -> Script:
        return Script("plain", rng.randint(50, 300), (Segment(rng.randint(20, 80), None, 0),))

    coming = arrivals(script, rate, until_s, rng)
    gpu = load_profile("paper-gptj-6b-a100")
    simulation = Simulation(gpu, "lru", duration_s=until_s, drain_s=until_s, first_token_limit_s=limit_s)
    return simulation.run(coming)


def good(report: Report) -> float:
    return report["goodput_per_s"] * report["simulated_s"]


def test_goodput_past_saturation_stays_where_it_was_and_forecasts_are_near() -> None:
    most = good(overloaded(60.0, None))
    taken, refusing = overloaded(120.0, None), overloaded(120.0, 2.0)
    assert good(refusing) >= 0.9 * most > 1.2 * good(taken)
    assert refusing["ttft_s"]["p99"] < 3.0 < taken["ttft_s"]["p99"]
    told = [(forecast_s, actual_s) for forecast_s, actual_s in refusing["first_token_checks_s"] if forecast_s > 0.3]
    assert fmean(abs(forecast_s - actual_s) for forecast_s, actual_s in told) < 0.5 * fmean(
        actual_s for _, actual_s in told
    )
    assert refusing["refused"] + refusing["unfinished"] < refusing["requests"]
    assert min(refusing["refused_retry_s"]) > 0.0


def test_a_request_that_comes_again_when_it_was_told_to_is_taken() -> None:
    """A burst, and then nothing but the one request that was refused last."""
    gpu = load_profile("paper-gptj-6b-a100")
    script = Script("plain", 300, (Segment(60, None, 0),))
    simulation = Simulation(gpu, "lru", duration_s=60.0, kv_tokens=8000, first_token_limit_s=2.0)
    burst = [Arrival(0.01 * number, script) for number in range(400)]
    first = simulation.run(burst)
    retry_s = first["refused_retry_s"][-1]
    assert first["refused"] > 100
    again = simulation.run([*burst, Arrival(burst[-1].at_s + 1.05 * retry_s, script)])
    assert again["refused"] == first["refused"]
