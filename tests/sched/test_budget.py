"""How much may cross the link, and which way."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jinfercept.sched.budget import Split, split_budget, swap_budget
from jinfercept.sched.profile import load_profile

tokens = st.integers(0, 2000)


def test_the_budget_is_what_hides_behind_the_step() -> None:
    assert swap_budget(0.5, lambda tokens: tokens / 1000, 10_000) == 500
    assert swap_budget(0.4999, lambda tokens: tokens / 1000, 10_000) == 499


def test_copies_of_pages_have_a_cost_of_their_own_in_it() -> None:
    def swap_s(num_tokens: int) -> float:
        return math.ceil(num_tokens / 16) * 0.01 + num_tokens / 1600  # 0.02 s a page

    assert swap_budget(0.1, swap_s, 10_000) == 80
    assert swap_budget(0.0999, swap_s, 10_000) == 79  # the last page is one token short


def test_the_budget_stays_between_nothing_and_the_most() -> None:
    assert swap_budget(1.0, lambda tokens: 0.0, 300) == 300
    assert swap_budget(0.001, lambda tokens: 0.01 + tokens, 300) == 0
    assert swap_budget(1.0, lambda tokens: math.inf if tokens else 0.0, 300) == 0


def test_the_papers_iteration_hides_the_papers_budget() -> None:
    profile = load_profile("paper-gptj-6b-a100")
    assert swap_budget(profile.step_s(384, 9999), profile.swap_s, 10_000) == 605


def test_swap_in_comes_first_and_swap_out_gets_the_rest() -> None:
    split = split_budget(600, wanted_out=500, wanted_in=400, wanted_new=20, free_host=1000, free_device=1000)
    assert split == Split(swap_out=200, swap_in=400, new=20)


def test_swap_in_is_limited_by_the_slots_that_new_tokens_leave() -> None:
    split = split_budget(600, wanted_out=500, wanted_in=400, wanted_new=20, free_host=1000, free_device=100)
    assert split == Split(swap_out=500, swap_in=80, new=20)


def test_what_comes_in_makes_room_on_the_host() -> None:
    split = split_budget(600, wanted_out=500, wanted_in=100, wanted_new=0, free_host=50, free_device=1000)
    assert split == Split(swap_out=150, swap_in=100, new=0)


def test_swap_out_makes_room_for_new_tokens_and_without_it_they_wait() -> None:
    split = split_budget(600, wanted_out=30, wanted_in=100, wanted_new=50, free_host=1000, free_device=10)
    assert split == Split(swap_out=30, swap_in=0, new=40)


@given(tokens, tokens, tokens, tokens, tokens, tokens)
def test_no_constraint_is_ever_broken(
    budget: int, wanted_out: int, wanted_in: int, wanted_new: int, free_host: int, free_device: int
) -> None:
    out, in_, new = split_budget(
        budget,
        wanted_out=wanted_out,
        wanted_in=wanted_in,
        wanted_new=wanted_new,
        free_host=free_host,
        free_device=free_device,
    )
    assert out + in_ <= budget
    assert out <= free_host + in_
    assert in_ + new <= out + free_device
    assert 0 <= out <= wanted_out
    assert 0 <= in_ <= wanted_in
    assert 0 <= new <= wanted_new


@given(st.floats(0, 10), st.floats(0, 0.1), st.floats(1e-6, 0.1), st.integers(0, 5000))
def test_the_transfer_of_a_budget_fits_and_one_token_more_does_not(
    step_s: float, fixed_s: float, per_token_s: float, most: int
) -> None:
    def swap_s(num_tokens: int) -> float:
        return fixed_s * (num_tokens > 0) + per_token_s * num_tokens

    budget = swap_budget(step_s, swap_s, most)
    assert swap_s(budget) <= step_s
    assert budget == most or swap_s(budget + 1) > step_s
