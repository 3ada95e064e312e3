"""What the studies of architectures and optimisations compute and simulate: steady states, wrong profiles, gains."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.sim.workload import Script, Segment
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
from studies.questions.machines import DEPLOYMENTS, Deployment, mixed_demand, mixed_load
from studies.questions.optimisations import gain
from studies.questions.steady_state import (
    demand,
    most_over_dropping,
    most_over_keeping,
    paper_rates,
    steady_state,
    with_kv_bytes,
)

SCRIPT = Script("qa", 100, (Segment(10, 2.0, 30), Segment(20, None, 0)))
machines = st.sampled_from(DEPLOYMENTS)
shares = st.sampled_from([0.0, 0.5, 0.9])


def test_the_demand_of_a_request_by_hand() -> None:
    need = demand([SCRIPT])
    assert (need.computed, need.decoded, need.paused_token_s, need.dropped) == (160, 30, 2 * 110, 110)
    assert need.read == need.memory == pytest.approx((10 * 105 + 20 * 150) / 30)
    assert need.pairs == pytest.approx(100**2 / 2 + 30 * (110 + 15))
    assert need.dropped_pairs == pytest.approx(110**2 / 2)
    assert need.common == 0


def test_a_shared_prefix_is_read_but_neither_computed_nor_dropped() -> None:
    alone, shared = demand([SCRIPT]), demand([SCRIPT], 0.5)
    assert shared.computed == alone.computed - 50
    assert shared.dropped == alone.dropped - 50
    assert shared.paused_token_s == alone.paused_token_s - 2 * 50
    assert shared.read == alone.read == shared.memory + 50
    assert shared.pairs == alone.pairs - 50**2 / 2
    assert demand([SCRIPT, SCRIPT._replace(kind="ve")], 0.5).common == 100, "once for each kind"


@given(machines, shares)
def test_nothing_beats_free_pauses(machine: Deployment, share: float) -> None:
    paper = paper_rates(machine.profile, mixed_demand(share), machine.kv_tokens, machine.profile.saturation)
    assert 0 < max(paper.kept, paper.dropped, paper.swapped) <= paper.free * 1.000001
    assert paper.most_gain >= 0.999999


@given(machines, shares, st.floats(0.1, 4.0))
def test_closed_forms_bound_the_gains_of_every_machine(machine: Deployment, share: float, size: float) -> None:
    need, kv_tokens, step = mixed_demand(share), size * machine.kv_tokens + 50_000, machine.profile.saturation
    paper = paper_rates(machine.profile, need, kv_tokens, step)
    kept = steady_state(machine.profile, need, kv_tokens, step, keeps=True)
    assert paper.free / kept.rate <= most_over_keeping(need, kept.step_s) * 1.01, "steps are priced by whole tokens"
    assert paper.free / paper.dropped <= most_over_dropping(need) * 1.01


@given(machines, shares, st.floats(0.1, 1.0))
def test_fewer_bytes_per_token_carry_no_less(machine: Deployment, share: float, times: float) -> None:
    small = with_kv_bytes(machine.profile, times)
    before = steady_state(
        machine.profile, mixed_demand(share), machine.kv_tokens, machine.profile.saturation, keeps=True
    )
    after = steady_state(small, mixed_demand(share), small.tables["derived"]["kv_tokens"], small.saturation, keeps=True)
    assert after.rate >= before.rate * 0.999


@given(machines)
def test_a_pool_without_end_leaves_nothing_to_win(machine: Deployment) -> None:
    assert paper_rates(machine.profile, mixed_demand(0.0), 1e12, machine.profile.saturation).most_gain == pytest.approx(
        1.0
    )


@given(machines, shares)
def test_memory_and_steps_hold_what_runs(machine: Deployment, share: float) -> None:
    need, size = mixed_demand(share), machine.profile.saturation
    full = steady_state(machine.profile, need, machine.kv_tokens, size, keeps=True)
    occupied_tokens = need.common + full.running * need.memory + full.rate * need.paused_token_s
    assert occupied_tokens <= machine.kv_tokens * 1.000001
    assert full.running * need.computed / need.decoded <= size * 1.000001
    assert full.rate == pytest.approx(full.running / need.decoded / full.step_s)


def test_bytes_of_kv_change_pool_link_and_reading_only() -> None:
    [machine] = [deployment for deployment in DEPLOYMENTS if deployment.label == "llama-2-7b, A100-80GB"]
    half = with_kv_bytes(machine.profile, 0.5)
    assert half.tables["derived"]["kv_tokens"] == 2 * machine.kv_tokens
    assert half.swap_s(1000) == pytest.approx(machine.profile.swap_s(1000) / 2)
    assert half.per_context_s == machine.profile.per_context_s / 2
    assert (half.per_query_s, half.flat_s, half.saturation) == (
        machine.profile.per_query_s,
        machine.profile.flat_s,
        machine.profile.saturation,
    )


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
