"""Contexts that nobody comes back for: in nobody's way, and gone when their time is over."""

from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.engine.retained_contexts import RetainedContexts
from jinfercept.events import Finished
from jinfercept.request import FollowUp, Request
from jinfercept.sched.estimator import ElapsedEstimator, Estimator, HistoryEstimator
from jinfercept.sched.orders import make_order
from jinfercept.sched.policies import PolicyInputs
from tests.support.engine_requests import ask, policy, served, stream
from tests.support.fake_engine import (
    VOCAB,
    AffineCost,
    FakeRunner,
    ManualClock,
    fail_next_step,
    make_engine,
    run_all,
    sampled_names,
)

POLITE: Any = {"tenant": "polite", "cache_salt": "polite"}
HOSTILE: Any = {"tenant": "hostile", "cache_salt": "hostile"}


def num_steps(engine: Engine, request: Request) -> int:
    """Steps until it has its first token."""
    engine.submit(request)
    for number in range(100):
        if any(event.request_id == request.id for event in engine.step()):
            return number
    raise AssertionError("no token")


@pytest.mark.parametrize("name", sampled_names())
@pytest.mark.parametrize("num_host_pages", [0, 4, 100])
def test_contexts_that_fill_the_pool_and_that_nobody_comes_back_for_delay_a_newcomer_by_a_step_at_most(
    name: str, num_host_pages: int
) -> None:
    newcomer = ask("new", [90] * 30)
    idle = make_engine(policy(name), num_pages=20, num_host_pages=num_host_pages)
    engine = make_engine(policy(name), num_pages=20, num_host_pages=num_host_pages)
    for number in range(12):
        served(engine, ask(f"gone{number}", [number] * 25, follow_up=FollowUp(f"s{number}")))
    assert num_steps(engine, newcomer) <= num_steps(idle, newcomer) + 1
    served(engine)


def cached_by_a_session_among_strangers(name: str, estimator: Estimator, num_pages: int, num_host_pages: int) -> int:
    """Tokens of its prompts that a session finds, of ten turns between which four others come, who never come back."""
    clock, rng, numbers = ManualClock(), Random(1), count()
    engine = make_engine(
        PolicyInputs(AffineCost(), 16, 4, estimator).make(name),
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        clock=clock,
        estimator=estimator,
    )
    num_cached, own_tokens = 0, list(range(40))

    def strangers(number: int) -> None:
        for _ in range(number):
            prompt = [rng.randrange(VOCAB) for _ in range(18)]
            served(engine, ask(f"stranger {next(numbers)}", prompt, 2, follow_up=FollowUp()))
            clock.time += 0.6

    strangers(12)
    for turn in range(10):
        [output] = served(engine, ask(f"mine {turn}", own_tokens, 4, follow_up=FollowUp("mine")))
        num_cached += output.num_cached_tokens
        own_tokens = [*stream(output), turn]
        strangers(4)
    return num_cached


@pytest.mark.parametrize("num_pages", [56, 64])
@pytest.mark.parametrize("num_host_pages", [0, 8])
def test_a_session_finds_as_much_among_strangers_as_if_the_least_recently_used_went_first(
    num_pages: int, num_host_pages: int
) -> None:
    ours = cached_by_a_session_among_strangers("copy_ahead", HistoryEstimator(), num_pages, num_host_pages)
    strangers_tokens = cached_by_a_session_among_strangers("lru", ElapsedEstimator(), num_pages, num_host_pages)
    assert ours + 4 >= strangers_tokens > 500  # but for a page


def test_what_has_lost_its_last_page_is_kept_no_more() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=8)
    served(engine, ask("gone", [1] * 10, follow_up=FollowUp("s")))
    served(engine, ask("large", [2] * 20, 10))
    served(engine, ask("small", [3], 2))
    assert engine.num_retained == 0


def test_the_one_kept_longest_goes_when_there_are_too_many_and_each_when_its_time_is_over() -> None:
    retain = partial(RetainedContexts, max_contexts=2, max_age_s=100.0)
    engine = make_engine(policy("copy_ahead"), num_pages=40, clock=(clock := ManualClock()), retain=retain)
    for number in range(3):
        served(engine, ask(f"r{number}", [number] * 6, follow_up=FollowUp(f"s{number}")))
    assert engine.num_retained == 2
    [first] = served(engine, ask("again", [0] * 20, follow_up=None))
    assert first.retained is None
    clock.time += 101.0
    served(engine, ask("any", [9], 3))
    assert engine.num_retained == 0


def test_a_tenant_that_keeps_many_contexts_costs_another_none() -> None:
    retain = partial(RetainedContexts, max_contexts=6)
    engine = make_engine(policy("copy_ahead"), num_pages=80, retain=retain)
    own_tokens = [
        served(engine, ask(f"mine{number}", [50 + number] * 10, follow_up=FollowUp(f"s{number}"), **POLITE))[0]
        for number in range(3)
    ]
    for number in range(34):  # in sessions of the same names, and of others
        served(engine, ask(f"r{number}", [number] * 10, follow_up=FollowUp(f"s{number % 5}"), **HOSTILE))
        served(engine, ask(f"more{number}", [number] * 10, follow_up=FollowUp(), **HOSTILE))
    assert engine.num_retained == 6
    for number, output in enumerate(own_tokens):
        follow = ask(f"again{number}", [*stream(output), 1], follow_up=FollowUp(f"s{number}"), **POLITE)
        [again] = served(engine, follow)
        assert again.retained is not None
        assert again.retained.recomputed == 0


def test_a_tenant_finds_and_drops_no_context_of_another_even_with_the_same_salt() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=80)
    [own_tokens] = served(engine, ask("mine", [1] * 10, follow_up=FollowUp("s"), tenant="polite"))
    stolen = ask("theirs", [*stream(own_tokens), 1], follow_up=FollowUp("s"), follows="mine", tenant="hostile")
    [strangers_tokens] = served(
        engine, stolen, ask("other", [2] * 10, follow_up=FollowUp("s"), follows="mine", tenant="hostile")
    )[:1]
    assert (strangers_tokens.retained, engine.num_retained) == (None, 2)
    [again] = served(engine, ask("again", [*stream(own_tokens), 1], follow_up=FollowUp("s"), tenant="polite"))
    assert again.retained is not None


def test_a_tenant_keeps_so_many_contexts() -> None:
    retain = partial(RetainedContexts, max_per_tenant=2)
    engine = make_engine(policy("copy_ahead"), num_pages=80, retain=retain)
    for number in range(4):
        served(engine, ask(f"r{number}", [number] * 10, follow_up=FollowUp(), tenant="a"))
    served(engine, ask("b", [9] * 10, follow_up=FollowUp(), tenant="b"))
    assert engine.num_retained == 3


def test_among_contexts_of_one_prompt_that_of_the_most_tokens_is_found() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=400)
    prompt = [number % VOCAB for number in range(40)]
    others = [ask(f"r{number}", prompt, 2, follow_up=FollowUp()) for number in range(20)]
    first, *_ = served(engine, ask("first", prompt, 9, follow_up=FollowUp()), *others)
    assert engine.num_retained == 21
    [second] = served(engine, ask("second", [*stream(first), 5], follow_up=FollowUp()))
    assert second.retained is not None
    assert second.retained.kept == 48


def test_a_released_context_is_free_at_once() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40)
    served(engine, ask("a", [1] * 10, follow_up=FollowUp("s")))
    engine.release("a")
    engine.release("never heard of")
    assert engine.num_retained == 0
    assert engine.scheduler.kv.occupancy().paused == 0


def test_the_last_of_a_session_goes_on_from_it_and_is_not_kept() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40)
    [first] = served(engine, ask("a", [1] * 10, follow_up=FollowUp("s")))
    [second] = served(engine, ask("b", [*stream(first)[:12], 4, 5], follow_up=FollowUp("s", last=True)))
    assert second.retained is not None
    assert engine.num_retained == 0


def test_under_preserve_nothing_is_kept() -> None:
    engine = make_engine(policy("preserve"), num_pages=40)
    run_all(engine, [ask("a", [1] * 10, follow_up=FollowUp("s"))])  # no claim is left
    assert engine.num_retained == 0


def test_a_failed_step_forgets_what_was_kept() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40)
    [first] = served(engine, ask("a", [1] * 10, follow_up=FollowUp("s")))
    fail_next_step(engine)
    engine.submit(ask("b", [2] * 5))
    engine.step()
    assert engine.num_retained == 0
    [second] = served(engine, ask("c", [*stream(first), 5], follow_up=FollowUp("s")))
    assert (second.retained, second.num_cached_tokens) == (None, 0)


def answered_in_time(order: str, patience_s: float, back_s: float) -> tuple[int, int]:
    """How many of 24 sessions get an answer from a pool for three, while clients give up and ask again; tokens computed."""
    cost, clock, rng, runner = AffineCost(0.02, 0.01), ManualClock(), Random(1), FakeRunner(4, (4, 16))
    engine = make_engine(
        policy("copy_ahead"),
        num_pages=38,
        runner=runner,
        clock=clock,
        order=make_order(order, PolicyInputs(cost, 16, 4, ElapsedEstimator())),
    )
    prompts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(24)]
    returns = {number: 4.0 * rng.random() for number in range(24)}  # when a session's client asks, again or first
    began: dict[str, tuple[int, float]] = {}
    num_answered = num_tokens = num_plans = 0
    while clock.time < 60.0 and (returns or began):
        for number, at_s in sorted(returns.items(), key=lambda item: item[1]):
            if at_s <= clock.time:
                del returns[number]
                name = f"{number} at {clock.time}"
                began[name] = number, clock.time
                engine.submit(ask(name, prompts[number], 8, follow_up=FollowUp(str(number))))
        for name, (number, at_s) in list(began.items()):
            if clock.time - at_s > patience_s:
                engine.abort(name)
                del began[name]
                returns[number] = clock.time + back_s * (0.5 + rng.random())
        events = engine.step()
        clock.time += sum(map(cost.plan_s, runner.plans[num_plans:])) or 0.01
        num_tokens += sum(plan.num_tokens for plan in runner.plans[num_plans:])
        num_plans = len(runner.plans)
        num_answered += sum(
            isinstance(event, Finished) and began.pop(event.request_id, None) is not None for event in events
        )
    return num_answered, num_tokens


ORDERS = pytest.mark.parametrize("order", ["fcfs", "missing_work"])


@ORDERS
@pytest.mark.parametrize("back_s", [0.0, 0.5, 2.0])
def test_clients_that_give_up_and_ask_again_are_all_answered(order: str, back_s: float) -> None:
    num_answered, num_tokens = answered_in_time(order, 3.0, back_s)
    assert num_answered == 24
    assert num_tokens < 1.5 * 24 * 48


@ORDERS
@pytest.mark.parametrize(
    ("absent_s", "again", "is_first"),
    [
        (0.0, ask("again", [1] * 9), True),
        (290.0, ask("again", [1] * 9), True),
        (310.0, ask("again", [1] * 9), False),
        (0.0, ask("again", [3] * 9), False),
        (0.0, ask("again", [1] * 9, cache_salt="other"), False),
        (0.0, ask("again", [1] * 9, priority=1), False),
    ],
)
def test_the_same_prompt_soon_again_has_the_place_of_the_aborted_one(
    order: str, absent_s: float, again: Request, is_first: bool
) -> None:
    clock = ManualClock()
    cost = PolicyInputs(AffineCost(), 16, 4, ElapsedEstimator())
    engine = make_engine(policy("copy_ahead"), num_pages=40, max_num_seqs=1, clock=clock, order=make_order(order, cost))
    for request in (ask("runs", [0] * 9, 9), ask("aborted", [1] * 9), ask("other", [2] * 9)):
        engine.submit(request)
        engine.step()
        clock.time += 0.1
    engine.abort("aborted")
    engine.step()
    clock.time += absent_s
    outputs = run_all(engine, [again])
    first_s = {name: output.metrics.first_token_s or 0.0 for name, output in outputs.items()}
    assert (first_s["again"] < first_s["other"]) is is_first
