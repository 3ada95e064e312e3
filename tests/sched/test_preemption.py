"""Whether a preempted sequence's pages are swapped or recomputed, in which order they are lost, what is written through."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jinfercept.kv.manager import KVManager
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.named_profiles import LLAMA_2_7B, roofline
from jinfercept.sched.policy import Action
from jinfercept.sched.profile import Profile
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.transfers import PreemptedSequences, cheaper, pages_per_copy
from tests.support.scheduler_bench import SIZE, SchedulerBench

A100 = roofline(LLAMA_2_7B, "A100-40GB", attention=True)


@st.composite
def links(draw: st.DrawFn) -> Profile:
    """The A100 with a link of any speed and any cost per copy."""
    rate = draw(st.floats(1e2, 1e7))
    copy_s, copy_tokens = draw(st.floats(0.0, 1e-3)), draw(st.sampled_from([0.0, 0.25, 16.0]))
    rates = {f"link_{way}_tokens_per_s": rate for way in ("out", "in", "both")}
    return replace(A100, **rates, copy_s=copy_s, copy_tokens=copy_tokens)


@given(links(), st.integers(1, 60_000), st.integers(1, 60_000), st.sampled_from([16, 176, 2560]))
def test_both_prices_grow_with_the_context_and_the_lower_one_decides(
    profile: Profile, tokens: int, more: int, chunk: int
) -> None:
    assert profile.swap_s(tokens) <= profile.swap_s(tokens + more)
    assert profile.recompute_s(tokens, chunk) <= profile.recompute_s(tokens + more, chunk) * (1 + 1e-9)
    swaps = cheaper(profile, tokens, chunk) is Action.SWAP
    assert swaps == (2 * profile.swap_s(tokens) < profile.recompute_s(tokens, chunk))


@given(links(), st.floats(1e-4, 10.0))
def test_what_the_link_moves_in_a_time_takes_no_longer(profile: Profile, seconds: float) -> None:
    moved = profile.link_tokens(seconds)
    ceil_s = profile.copy_s if profile.copy_tokens else 0.0  # the last copy is not full
    assert profile.swap_s(moved) <= seconds * (1 + 1e-9) + ceil_s
    assert moved <= replace(profile, copy_s=0.0).link_tokens(seconds)


@given(links())
def test_pages_leave_together_as_long_as_their_bytes_take_no_longer_than_the_copy(profile: Profile) -> None:
    together = pages_per_copy(profile, 16)
    page_s = profile.swap_s(16) - profile.copies_s(16)
    assert (together == 1) or (
        profile.swap_s(16 * together) <= 2 * profile.copies_s(16) + page_s
        and profile.copies_s(16 * together) == profile.copies_s(16)
    )
    assert pages_per_copy(replace(profile, copy_s=0.0), 16) == 1
    assert pages_per_copy(replace(profile, copy_s=3.5 * page_s, copy_tokens=0.0), 16) == 4
    assert pages_per_copy(replace(profile, copy_s=3.5 * page_s, copy_tokens=32.0), 16) == 2


def sequence(name: str, order: int, num_pages: int) -> Sequence:
    kv = KVManager(num_pages, 0, 16)
    tokens, context = [1] * 16 * num_pages, kv.open()
    kv.hold(context)
    kv.place(context, 0, len(tokens))
    kv.computed(context, 0, len(tokens))
    kv.commit(context, tokens)
    kv.release(context)
    made = Sequence(name, tokens, context, max_tokens=1)
    made.order = order
    return made


def test_the_youngest_loses_its_last_page_first() -> None:
    preempted = PreemptedSequences("auto", A100, 176, 16, has_host=True)
    old, young = sequence("old", 1, 2), sequence("young", 2, 3)
    preempted.add(young)
    preempted.add(old)
    moves = [move for move, _ in preempted.victims()]
    assert [(move.sequence, list(move.pages), move.action) for move in moves] == [
        (young, [2, 1, 0], Action.SWAP),
        (old, [1, 0], Action.SWAP),
    ]


def test_a_sequence_that_has_run_or_paused_since_keeps_its_pages() -> None:
    preempted = PreemptedSequences("auto", A100, 176, 16, has_host=False)
    victim = sequence("one", 1, 2)
    preempted.add(victim)
    assert next(preempted.victims())[0].action is Action.LOSE  # there is no host to swap to
    victim.paused_s = 3.0
    assert not list(preempted.victims())


def test_writing_through_ends_where_a_paused_context_shares_pages_with_one_that_runs() -> None:
    """The host is too small for both: copies of a running context give way, and are not made again for the paused one."""
    bench = SchedulerBench(LeastRecentlyUsed(writes_through=True), num_pages=60, num_host_pages=8)
    running = bench.prefilled("running", 12 * SIZE, max_tokens=60)
    paused = Sequence("paused", [*running.tokens[: 12 * SIZE], *range(6 * SIZE)], bench.kv.open(), max_tokens=8)
    bench.scheduler.add(paused)
    while paused.generated == 0:
        bench.step()
    bench.scheduler.intercept(paused, bench.now_s)
    bench.steps(20)
    assert sum(len(plan.offload) for plan in bench.steps(20)) <= 20 // SIZE  # what the running one generates
