"""What the studies of architectures and of optimisations simulate: variants, wrong profiles, combinations, and gains."""

from dataclasses import replace

import pytest

from studies.capacity import Capacity
from studies.questions.architecture_trials import (
    BELIEVED_INSTEAD,
    TRUE,
    Trial,
    runs,
    step_variant,
    with_compute,
    with_link,
)
from studies.questions.combinations import DROPPING, POLICIES, SIMULATED, combined
from studies.questions.combinations import runs as combination_runs
from studies.questions.machines import DEPLOYMENTS, mixed_demand, mixed_load
from studies.questions.optimisations import gain

PROFILE = DEPLOYMENTS[0].profile


def test_a_wrong_profile_is_wrong_in_one_thing() -> None:
    fast = with_link(PROFILE, 4.0)
    assert fast.swap_s(1000) == pytest.approx(PROFILE.swap_s(1000) / 4)
    assert fast.step_s(500, 10) == PROFILE.step_s(500, 10)
    slow = with_compute(PROFILE, 0.25)
    assert slow.saturation == PROFILE.saturation // 4
    assert slow.step_s(1, 0) == PROFILE.step_s(1, 0) == PROFILE.flat_s
    assert slow.step_s(4000, 0) == pytest.approx(4 * PROFILE.step_s(4000, 0))
    assert (
        replace(slow, per_query_s=PROFILE.per_query_s, per_pair_s=PROFILE.per_pair_s, saturation=PROFILE.saturation)
        == PROFILE
    )


def test_trials_of_a_deployment_share_arrivals_and_prices() -> None:
    trial_runs = runs(mixed_demand(0.0), 0, quick=True)
    [label] = {trial.deployment for trial in trial_runs}
    assert len({id(run.load) for run in trial_runs.values()}) == 1
    assert len({run.simulation.profile for run in trial_runs.values()}) == 1
    assert trial_runs[Trial(label, step_variant(512), "copy_ahead")].simulation.buckets == tuple(range(1, 513))
    assert trial_runs[Trial(label, TRUE, "copy_ahead")].simulation.believed is None
    assert label in BELIEVED_INSTEAD


def test_every_deployment_holds_the_longest_request() -> None:
    longest = max(script.context for _, script in mixed_load(5.0, 100.0, 0).arrivals)
    for deployment in DEPLOYMENTS:
        simulation = deployment.simulation("copy_ahead", 10.0, mixed_demand(0.0))
        assert longest < simulation.max_model_len <= deployment.kv_tokens


def test_combinations_shrink_the_bytes_and_share_the_prompts() -> None:
    made = combined(SIMULATED[:1])
    assert len(made) == 4
    for key, run in combination_runs(made, 0, quick=True).items():
        case = made[key.combination]
        assert run.simulation.shared_prefix == key.combination.shared
        assert run.simulation.kv_tokens == case.machine.kv_tokens
        assert run.load.rate == case.offered(key.policy)[key.load]
    first = next(iter(made.values()))
    assert {first.paper_rate(policy) for policy in DROPPING} == {first.paper.dropped}
    assert max(map(first.paper_rate, POLICIES)) == first.paper.free


def test_a_gain_is_what_is_known_at_least() -> None:
    loads = {"copy_ahead": Capacity(3.0, ">"), "lru": Capacity(2.0, ">"), "discard": Capacity(1.0, "<")}
    assert gain(loads, "discard") == 3.0
    assert gain(loads, "lru") is None
    assert gain(loads, "swap") is None
