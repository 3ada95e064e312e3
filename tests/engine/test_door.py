"""New conversations at the door: who waits there, who passes, who comes in next, and who leaves."""

from typing import Any

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.engine.retained_contexts import RetainedContexts
from jinfercept.events import Finished, Token
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sched.door import IDLE_S, LATE_S, MOST_DOOR_S, Overload
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.orders import make_order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.queues import LONGEST_S
from tests.support.engine_requests import ask, policy, served, stream
from tests.support.fake_engine import AffineCost, ManualClock, make_engine
from tests.support.pretend import late_at_once

DEVICE, HOST = 16, 16
"""Pages of 4 tokens."""
SLOW: Any = {"num_pages": DEVICE, "num_host_pages": HOST, "per_query_s": 0.1}
"""A context of 20 tokens takes two seconds to compute."""


def crowded(overload: Overload = "queue", **more: Any) -> tuple[Engine, ManualClock, RequestOutput]:
    """An engine whose memory one conversation nearly fills, all of whose turns came late; and its last output."""
    clock = ManualClock()
    engine = make_engine(policy("copy_ahead"), clock=clock, overload=overload, **SLOW, **more)
    tokens, output = [1] * 40, None
    for number in range(6):
        arrives(engine, ask(f"turn {number}", tokens, 2, follow_up=FollowUp("inside")))
        clock.time += 10.0
        output = finished(engine)[f"turn {number}"]
        tokens = [*stream(output), number]
    assert output is not None
    return engine, clock, output


def arrives(engine: Engine, request: Request) -> int | None:
    """Its place at the door, where it has one."""
    engine.submit(request)
    return engine.place_at_door([request])


def finished(engine: Engine) -> dict[str, RequestOutput]:
    """The outputs of all that is open."""
    outputs = dict[str, RequestOutput]()
    for _ in range(5_000):
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
        if not engine.has_work:
            break
    return outputs


def new(name: str, length: int = 40, **more: Any) -> Request:
    return ask(name, [sum(map(ord, name)) % 90] * length, follow_up=FollowUp(name), **more)


def test_a_new_conversation_waits_while_memory_has_no_room_and_one_that_is_inside_passes() -> None:
    engine, clock, last = crowded()
    assert [arrives(engine, new("a")), arrives(engine, new("b"))] == [1, 2]
    assert engine.num_waiting == 2
    clock.time += 30.0
    engine.submit(third := ask("third", [*stream(last), 3], 2, follow_up=FollowUp("inside")))
    for _ in range(20):
        engine.step()
    assert third.id not in engine.requests, "it was served"
    assert [engine.place_at_door([new(name)]) for name in "ab"] == [1, 2]
    clock.time += IDLE_S
    outputs = finished(engine)
    assert sorted(outputs) == ["a", "b"]
    assert outputs["a"].metrics.door_s > IDLE_S


def test_a_short_conversation_comes_in_where_there_is_room_and_not_past_one_that_waits() -> None:
    engine, _, _ = crowded()
    assert arrives(engine, new("short", 4)) == 0
    assert [arrives(engine, new("long")), arrives(engine, new("shorter", 3))] == [1, 2]


def test_the_door_is_shut_behind_conversations_for_whose_growth_there_is_no_room() -> None:
    engine = make_engine(policy("copy_ahead"), overload="queue", **SLOW)
    places = list[int | None]()
    for name in "abcdef":
        places.append(arrives(engine, new(name, 18, max_tokens=30)))
        engine.step()
    assert places == [0, 0, 0, 0, 1, 2], "two have room to grow, two more come in while no turn is late"
    assert sorted(finished(engine)) == [*"abcdef"]


def test_the_door_is_shut_while_a_request_inside_waits_too_long() -> None:
    engine, clock = make_engine(policy("copy_ahead"), num_pages=90, max_num_seqs=1, overload="queue"), ManualClock()
    engine.requests.clock = engine._clock = clock  # pyright: ignore[reportPrivateUsage]
    assert [arrives(engine, new(name, 9, max_tokens=30)) for name in "ab"] == [0, 0]
    engine.step()
    clock.time += LATE_S + 0.1
    assert arrives(engine, new("c", 9)) == 1
    assert sorted(finished(engine)) == ["a", "b", "c"]


def test_a_client_that_gives_up_leaves_at_once_and_has_its_place_when_it_asks_again() -> None:
    engine, clock, _ = crowded()
    assert [arrives(engine, new(name)) for name in "abc"] == [1, 2, 3]
    engine.abort("a")
    engine.step()
    assert [engine.place_at_door([new(name)]) for name in "abc"] == [0, 1, 2]
    clock.time += 20.0
    assert arrives(engine, ask("a again", [7] * 30, follow_up=FollowUp("a"))) == 1
    clock.time += IDLE_S
    outputs = finished(engine)
    first_s = {name: output.metrics.first_token_s or 0.0 for name, output in outputs.items()}
    assert first_s["a again"] <= min(first_s["b"], first_s["c"])


def test_a_request_that_waits_too_long_at_the_door_is_ended_and_one_that_repeats_it_has_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_at_once(monkeypatch)
    engine, clock, _ = crowded()
    assert [arrives(engine, new(name)) for name in "ab"] == [1, 2]
    for name in "12":
        engine.submit(ask(f"inside {name}", [5] * 40, 30))
    clock.time += MOST_DOOR_S + 1.0
    ended = {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    assert {name: output.outputs[0].finish_reason for name, output in ended.items()} == {"a": "abort", "b": "abort"}
    assert ended["a"].metrics.door_s > MOST_DOOR_S
    assert [arrives(engine, new("c")), arrives(engine, ask("again", [7] * 30, follow_up=FollowUp("a")))] == [1, 1]
    assert engine.place_at_door([new("c")]) == 2


def test_answers_that_are_the_last_ones_keep_no_one_out() -> None:
    engine = make_engine(policy("copy_ahead"), overload="queue", **SLOW)
    for number in range(12):
        assert arrives(engine, new(f"{number}")) == 0
        served(engine)


def test_a_tenant_without_a_conversation_inside_comes_in_at_once() -> None:
    engine, _, _ = crowded()
    assert arrives(engine, new("a")) == 1
    assert arrives(engine, new("b", tenant="other")) == 0
    assert arrives(engine, new("c", tenant="other")) == 1


def test_several_answers_to_a_prompt_at_the_door_wait_for_it_and_do_not_keep_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_at_once(monkeypatch)
    engine, clock, _ = crowded()
    assert arrives(engine, new("first")) == 1
    assert [arrives(engine, ask(f"{number}", [*new("first").prompt_token_ids], leader="first")) for number in "12"] == [
        0,
        0,
    ]
    clock.time += IDLE_S
    assert sorted(finished(engine)) == ["1", "2", "first"]


def test_a_request_that_no_other_follows_passes_the_door() -> None:
    engine, _, _ = crowded()
    assert arrives(engine, ask("alone", [5] * 40)) == 0


def test_every_conversation_comes_in_where_the_operator_says_so() -> None:
    engine, _, _ = crowded("serve")
    assert arrives(engine, new("a")) == 0


def test_a_conversation_that_has_lost_its_context_is_inside_still() -> None:
    engine, clock, last = crowded()
    clock.time += IDLE_S
    served(engine, new("a", 60))
    served(engine, ask("a again", [*[97 % 90] * 60, 4], follow_up=FollowUp("a")))
    assert arrives(engine, new("b")) == 1
    assert arrives(engine, ask("late", [*stream(last), 3], 2, follow_up=FollowUp("inside"))) == 0


def test_all_that_return_at_once_are_served_and_those_at_the_door_read_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_at_once(monkeypatch)
    outputs = dict[Overload, dict[str, list[int]]]()
    overloads: list[Overload] = ["queue", "serve"]
    for overload in overloads:
        clock = ManualClock()
        engine = make_engine(policy("copy_ahead"), num_pages=30, num_host_pages=20, clock=clock, overload=overload)
        inside = [new(f"inside {number}", 20) for number in range(6)]
        answers = served(engine, *inside)
        clock.time += 50.0
        returns = [
            ask(f"again {number}", [*stream(answer), 3], 9, follow_up=FollowUp(f"inside {number}"))
            for number, answer in enumerate(answers)
        ]
        for request in (*returns, *(new(f"later {number}", 40) for number in range(6))):
            engine.submit(request)
        ended = finished(engine)
        assert len(ended) == 12
        waited = [name for name, output in ended.items() if output.metrics.door_s > 0.0]
        assert [name.startswith("later") for name in waited] == [overload == "queue"] * len(waited)
        assert bool(waited) is (overload == "queue")
        outputs[overload] = {name: stream(output) for name, output in ended.items()}
    assert outputs["queue"] == outputs["serve"]


def test_a_tenant_whose_own_requests_are_late_keeps_no_other_one_out() -> None:
    clock = ManualClock()
    engine = make_engine(policy("copy_ahead"), num_pages=90, max_num_seqs=2, clock=clock, overload="queue")
    for request in (new("b", 60, max_tokens=30, tenant="other"), new("a", 9, max_tokens=30), new("c", 9)):
        assert arrives(engine, request) == 0
    for _ in range(9):
        engine.step()
    clock.time += LATE_S + 0.1
    assert arrives(engine, new("d", 9)) == 1
    assert arrives(engine, new("e", 9, tenant="other")) == 0
    assert sorted(finished(engine)) == ["a", "b", "c", "d", "e"]


def test_a_tenant_comes_in_up_to_its_share_of_memory_whatever_another_one_has() -> None:
    engine, _, _ = crowded()
    for name, length, place in ("a", 4, 0), ("b", 22, 0), ("c", 22, 1):
        assert arrives(engine, new(name, length, tenant="other", max_tokens=30)) == place
        for _ in range(3):
            engine.step()


def test_clients_that_leave_the_door_make_no_conversation_inside_be_forgotten() -> None:
    engine, _, _ = crowded(retain=lambda scheduler: RetainedContexts(scheduler, 2))
    for number in range(3):
        engine.submit(new(f"new {number}"))
        engine.step()
        engine.abort(f"new {number}")
        engine.step()
    assert [*engine.requests.retained.sequences] == ["turn 5"]


def test_a_client_that_leaves_its_answer_goes_before_all_others_no_more() -> None:
    order = make_order("missing_work", PolicyInputs(AffineCost(per_query_s=0.1), 16, 4, ElapsedEstimator()))
    clock = ManualClock()
    engine = make_engine(policy("copy_ahead"), num_pages=90, max_num_seqs=1, clock=clock, order=order)
    arrives(engine, new("impatient", 9, max_tokens=30))
    clock.time += LONGEST_S
    arrives(engine, new("a", 9))
    clock.time += 1.0
    while not any(isinstance(event, Token) for event in engine.step()):
        pass
    engine.abort("impatient")
    arrives(engine, ask("again", [7] * 9, follow_up=FollowUp("impatient")))
    assert [*finished(engine)][-2:] == ["a", "again"]


def test_a_place_at_the_door_is_that_among_the_conversations_of_its_tenant() -> None:
    engine, _, _ = crowded()
    assert [arrives(engine, new(name)) for name in "ab"] == [1, 2]
    assert arrives(engine, new("c", tenant="other")) == 0
    assert [arrives(engine, new(name, 60, tenant="other")) for name in "de"] == [1, 2]
