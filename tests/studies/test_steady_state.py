"""Loads on paper: hand-computed demand, limits by compute and memory, and what sharing and fewer bytes do to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.sim.workload import Script, Segment
from studies.questions.machines import DEPLOYMENTS, Deployment, mixed_demand
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
