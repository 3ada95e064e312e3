"""Contexts of finished requests: gone on from wherever their pages are, with the same tokens."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.calls import Call
from jinfercept.hooks import Watch
from jinfercept.outputs import ContextUse, RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.sequence import State
from tests.support.engine_requests import ask, policy, served, settle, stream
from tests.support.fake_engine import POLICIES, VOCAB, ManualClock, make_engine, uninterrupted


class AsksItsCaller:
    """Calls `search` with the third token, for whoever made the request to run."""

    def watch(self) -> Watch:
        return self

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        return (Call("search", "", (index, index + 1), by_caller=True),) if index == 2 else ()


# -- the same tokens ---------------------------------------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.integers(0, 3),  # whose turn
        st.integers(1, 6),  # tokens that it adds
        st.integers(0, 4),  # tokens of the last answer that come back differently
        st.integers(1, 5),  # tokens to generate
        st.sampled_from(["session", "request", "tokens", "stranger"]),
        st.booleans(),  # whether others arrive before it is done
    ),
    min_size=1,
    max_size=14,
)


@given(
    turns=TURNS,
    name=st.sampled_from(sorted(POLICIES)),
    num_pages=st.integers(14, 30),
    num_host_pages=st.sampled_from([0, 3, 40]),
    link=st.sampled_from([10.0, 1e3, 1e9]),
    depth=st.integers(0, 1),
)
def test_whatever_became_of_a_kept_context_the_tokens_are_those_of_an_undisturbed_run(
    turns, name, num_pages, num_host_pages, link, depth
) -> None:
    engine = make_engine(
        policy(name),
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        depth=depth,
        link_tokens_per_s=link,
        clock=ManualClock(),
        max_model_len=52,
    )
    outputs_of: dict[int, RequestOutput] = {}
    batch: list[tuple[int, Request]] = []
    for number, (who, added, differs, new, how, alone) in enumerate(turns):
        shared = stream(outputs_of[who]) if who in outputs_of else [who + 1] * 7
        shared = shared[: max(1, len(shared) - differs)] + [(7 * number + token) % VOCAB for token in range(added)]
        if len(shared) + new >= 52:
            continue
        request = ask(f"r{number}", shared, new, follow_up=FollowUp(f"s{who}" if how == "session" else ""))
        if how == "request" and who in outputs_of:
            request = replace(request, follows=outputs_of[who].request_id)
        if how == "stranger":
            request = replace(request, follow_up=None)
        if any(who == other for other, _ in batch):
            continue
        batch.append((who, request))
        if alone:
            outputs_of |= zip([who for who, _ in batch], served(engine, *(each for _, each in batch)), strict=True)
            batch.clear()
    outputs_of |= zip([who for who, _ in batch], served(engine, *(each for _, each in batch)), strict=True)
    for output in outputs_of.values():
        prompt, answer = tuple(output.prompt_token_ids), output.outputs[0]
        params = SamplingParams(max_tokens=answer.num_generated, temperature=0.0)
        assert answer.token_ids == uninterrupted(prompt, params, {}, 52)
    engine.close()
    assert engine.num_retained == 0
    assert engine.scheduler.kv.occupancy().paused == 0


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["session", "request", "tokens"])
def test_a_kept_context_is_found_by_session_by_request_and_by_its_tokens(how: str) -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40, num_host_pages=40)
    follow_up = FollowUp("s" if how == "session" else "")
    [first] = served(engine, ask("a", list(range(10)), 5, follow_up=follow_up))
    follow = ask("b", [*stream(first), 50, 51], follow_up=follow_up, follows="a" if how == "request" else None)
    [second] = served(engine, follow)
    assert engine.num_retained == 1
    assert [kept.session for kept in engine.scheduler.intercepted.values()] == ["s" if how == "session" else "a"]
    assert second.retained == ContextUse(
        kept=14, copied_in=0, recomputed=0
    )  # all but the last, which was never computed
    assert second.num_cached_tokens == 14
    assert second.metrics.recomputed_tokens == 0


def test_a_prompt_that_only_begins_alike_takes_nothing_away_from_a_session() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40)
    system = list(range(8))
    [first] = served(engine, ask("a", [*system, 30, 31, 32, 33], follow_up=FollowUp()))
    [other] = served(engine, ask("b", [*system, 40, 41, 42, 43], follow_up=FollowUp()))
    assert (other.retained, other.num_cached_tokens, engine.num_retained) == (None, 8, 2)
    [second] = served(engine, ask("c", [*stream(first), 60], follow_up=FollowUp()))
    assert second.retained is not None


def test_another_salt_finds_nothing() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40)
    [first] = served(engine, ask("a", list(range(10)), follow_up=FollowUp("s"), cache_salt="mine"))
    stolen = ask("b", [*stream(first), 1], follow_up=FollowUp("s"), cache_salt="theirs", follows="a")
    [second] = served(engine, stolen)
    assert (second.retained, second.num_cached_tokens, engine.num_retained) == (None, 0, 2)
    engine.release("b")
    assert engine.num_retained == 1


# -- as interceptions --------------------------------------------------------------------------------------------------


def test_while_nobody_is_served_the_policy_goes_on_copying() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40, num_host_pages=40, link_tokens_per_s=400.0)
    served(engine, ask("a", [1] * 40, follow_up=FollowUp("s")))
    settle(engine)
    kept = engine.scheduler.intercepted["a"]
    assert all(run.residency.on_host for run in kept.context.runs())


@pytest.mark.parametrize("name", ["copy_ahead", "lru_host"])
@pytest.mark.parametrize("num_host_pages", [5, 12, 31])
def test_a_host_that_is_full_costs_nobody_the_pages_that_are_on_the_device_and_copying_comes_to_an_end(
    name: str, num_host_pages: int
) -> None:
    clock = ManualClock()
    engine = make_engine(policy(name), num_pages=100, num_host_pages=num_host_pages, clock=clock, link_tokens_per_s=400)
    for number in range(16):
        served(engine, ask(f"r{number}", [number] * 20, follow_up=FollowUp(f"s{number}")))
        clock.time += 0.3
    for _ in range(40):
        clock.time += 0.01
        engine.step()
    assert engine.quiescent
    assert engine.num_retained == 16
    assert engine.scheduler.kv.occupancy().paused == 96


def test_durations_are_learned_under_the_tools_name_and_under_the_readers() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40, clock=(clock := ManualClock()))
    released: list[tuple[str, float, bool]] = []
    estimator = engine.scheduler._estimator
    estimator.observe = lambda call, duration_s, clean=True: released.append((call.name, duration_s, clean))  # type: ignore[method-assign]
    [first] = served(
        engine,
        ask(
            "a",
            [1] * 10,
            9,
            follow_up=FollowUp("s"),
            detector=AsksItsCaller(),
        ),
    )
    assert engine.scheduler.intercepted["a"].calls[0].name == "search"
    clock.time += 5.0
    [second] = served(engine, ask("b", [*stream(first), 1], follow_up=FollowUp("s", expected_s=3.0)))
    pause = engine.scheduler.intercepted["b"].calls[0]
    assert (pause.name, pause.expected_s) == ("<reader>", 3.0)
    clock.time += 60.0
    served(engine, ask("c", [*stream(second), 1], follow_up=FollowUp("s", reader="agent")))
    assert engine.scheduler.intercepted["c"].calls[0].name == "agent"
    assert [(name, round(seconds), clean) for name, seconds, clean in released] == [
        ("search", 5, True),
        ("<reader>", 60, True),
    ]


@pytest.mark.parametrize(("detector", "first"), [(AsksItsCaller(), "returns"), (None, "other")])
def test_after_a_call_a_request_has_its_old_place_and_after_an_answer_a_new_one(detector, first: str) -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=40, max_num_seqs=1)
    [output] = served(engine, ask("a", [1] * 10, 3, follow_up=FollowUp("s"), detector=detector))
    engine.submit(ask("busy", [3] * 5, 4))
    engine.step()
    engine.submit(ask("other", [4] * 5))
    engine.submit(ask("returns", [*stream(output), 1], follow_up=FollowUp("s")))
    engine.step()
    waiting = [sequence.id for sequence in engine.scheduler.waiting]
    assert sorted(waiting) == ["other", "returns"]
    assert waiting[0] == first
    served(engine)


def test_a_request_that_goes_on_waits_with_its_pages_and_loses_them_to_whoever_runs() -> None:
    engine = make_engine(policy("copy_ahead"), num_pages=12, max_num_seqs=1)
    [first] = served(engine, ask("a", [1] * 20, follow_up=FollowUp("s")))
    engine.submit(ask("busy", [3] * 5, 30))
    engine.step()
    engine.submit(ask("b", [*stream(first), 1], follow_up=FollowUp("s")))
    engine.step()
    waiting = engine.scheduler.waiting[0]
    assert waiting.state is State.WAITING
    assert engine.scheduler.kv.occupancy().paused == 6
    served(engine)
