"""Drafts are what followed before; as many as pay; and what is drawn counts up to the first that differs."""

from itertools import accumulate
from operator import mul

from hypothesis import given
from hypothesis import strategies as st

from jinfercept.sched.speculation import Acceptance, NgramIndex, choose_depths, kept

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def by_search(tokens: list[int], count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """The draft, found by comparing every place with the end."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = tokens[end:]
                return tuple(period[index % len(period)] for index in range(count))
    return ()


@given(tokens=TOKENS, count=st.integers(0, 6), shortest=st.integers(1, 3), more=st.integers(0, 2), cuts=TOKENS)
def test_a_draft_continues_the_latest_of_the_longest_ngrams(
    tokens: list[int], count: int, shortest: int, more: int, cuts: list[int]
) -> None:
    index, end = NgramIndex(shortest, shortest + more), 0
    for cut in cuts:  # the list grows between two drafts
        end = min(len(tokens), end + cut)
        index.draft(tokens[:end], count)
    few = [token + 4 * (place % 5) for place, token in enumerate(tokens)]  # few enough occurrences to compare them all
    assert NgramIndex(shortest, shortest + more).draft(few, count) == (
        by_search(few, count, shortest, shortest + more) if count else ()
    )
    assert index.draft(tokens, count) == NgramIndex(shortest, shortest + more).draft(tokens, count)


@given(drafts=st.lists(st.integers(0, 1), max_size=5), drawn=st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_tokens_count_up_to_the_first_that_differs(drafts: list[int], drawn: list[int]) -> None:
    count = kept(tuple(drafts), tuple(drawn[: len(drafts) + 1]))
    assert 1 <= count <= len(drafts) + 1
    assert drawn[: count - 1] == drafts[: count - 1]
    assert count == len(drafts) + 1 or drawn[count - 1] != drafts[count - 1]


def flat(tokens: int) -> float:
    return 1.0


def linear(tokens: int) -> float:
    return float(tokens)


def test_drafts_are_taken_where_they_are_likely_and_only_if_they_pay() -> None:
    both = [[0.9] * 4, [0.5] * 4]
    assert choose_depths(both, 2, 2, 30, flat) == [4, 3]  # 0.5 ** 4 is below the least chance
    assert choose_depths(both, 2, 2, 3, flat) == [3, 0]
    assert choose_depths(both, 2, 2, 30, linear) == [0, 0]  # a saturated step
    assert choose_depths(both, 2, 2, 30, lambda tokens: 1.0 if tokens <= 4 else 9.0) == [2, 0]
    assert choose_depths([[]], 1, 1, 30, flat) == [0]
    assert choose_depths([[0.9, 0.05, 0.9]], 1, 1, 30, flat) == [1]


def test_the_steps_of_a_draft_model_count() -> None:
    likely = [[0.9] * 8]
    assert choose_depths(likely, 1, 1, 30, flat, lambda rows: 0.0) == [8]
    assert choose_depths(likely, 1, 1, 30, flat, lambda rows: 0.4) == [
        4
    ]  # 4.095 tokens in 2.6 s; a fifth: 4.686 in 3.0
    assert choose_depths(likely, 1, 1, 30, flat, lambda rows: 1.0) == [0]
    several = [[0.9]] * 4
    assert choose_depths(several, 4, 4, 30, flat, lambda rows: 0.8) == [1] * 4  # one step for all of them
    assert choose_depths(several, 4, 4, 30, flat, lambda rows: 0.8 * rows) == [0] * 4


@given(
    prospects=st.lists(st.lists(st.floats(0, 1), max_size=5), max_size=6),
    most=st.integers(0, 12),
    buckets=st.sets(st.integers(1, 40), min_size=1),
)
def test_depths_are_within_their_limits_and_never_slower(
    prospects: list[list[float]], most: int, buckets: set[int]
) -> None:
    def step_s(tokens: int) -> float:
        return 1.0 + sum(bucket < tokens for bucket in buckets)

    number = max(1, len(prospects))
    depths = choose_depths(prospects, number, number, most, step_s)
    assert sum(depths) <= most
    assert all(depth <= len(chances) for depth, chances in zip(depths, prospects, strict=True))
    gain = sum(sum(accumulate(chances[:depth], mul)) for chances, depth in zip(prospects, depths, strict=True))
    assert (number + gain) / step_s(number + sum(depths)) >= number / step_s(number)


def test_the_chance_of_each_place_follows_what_was_accepted_and_returns_to_the_prior() -> None:
    state, before = Acceptance(4), [0.6] * 4
    for _ in range(20):
        state.note(4, 1)
    first, second, third, fourth = state.chances(before)
    assert first > 0.9
    assert second < 0.2
    assert third == fourth == 0.6  # they were never reached
    for _ in range(1000):
        state.note(1, 1)
    assert abs(state.chances(before)[1] - 0.6) < 0.05
    for _ in range(20):
        state.note(4, 4)
    assert min(state.chances(before)) > 0.9
