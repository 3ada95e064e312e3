"""A request that cannot be opened ends with the reason, and leaves nothing behind: no id, no adapter, no page."""

import collections.abc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.events import Event, Finished
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.policy import Move, Policy
from jinfercept.sched.sequence import Sequence
from tests.support.fake_engine import POLICIES, ManualClock, make_engine, run_all

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Unreadable(collections.abc.Sequence[Any]):
    """Token ids that raise when they are copied."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 9

    def __getitem__(self, place: Any) -> Any:
        raise self.error


class RaisesOnce(Policy):
    """`lru` that raises when a context ends or resumes, once it is armed, a single time."""

    def __init__(self) -> None:
        self._inner, self.armed = POLICIES["lru"](), False

    def pause(self, sequence: Sequence, now: float) -> None:
        self._inner.pause(sequence, now)

    def resume(self, sequence: Sequence, now: float) -> None:
        if self.armed:
            self.armed = False
            raise OSError("resume")
        self._inner.resume(sequence, now)

    def victims(self, now: float) -> Iterator[Move]:
        return self._inner.victims(now)


def small(policy: Policy | None = None) -> Engine:
    return make_engine(policy or POLICIES["lru"](), num_pages=16, clock=ManualClock())


def ask(name: str, prompt: Any = (1, 2, 3, 4, 5), **fields: Any) -> Request:
    return Request(name, prompt, PARAMS, ids_below=1, **fields)


def steps(engine: Engine) -> dict[str, Finished]:
    events = list[Event]()
    while engine.has_work:
        events += engine.step()
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def test_a_request_without_room_for_its_tokens_ends_alone_and_its_id_is_free() -> None:
    engine = small()
    expected = run_all(engine, [ask("a")])["a"].outputs[0].token_ids
    for request in (ask("a"), ask("b", Unreadable(MemoryError("9 tokens"))), ask("c")):
        engine.submit(request)
    ended = steps(engine)
    assert [ended[name].output.outputs[0].token_ids for name in "ac"] == [expected] * 2
    lost = ended["b"]
    assert (lost.output.outputs[0].finish_reason, lost.failure) == ("error", None)
    assert lost.output.outputs[0].stop_reason == "MemoryError: 9 tokens"
    assert run_all(engine, [ask("b")])["b"].outputs[0].token_ids == expected


def test_an_interrupt_of_the_main_thread_is_raised_and_keeps_no_id() -> None:
    engine = small()
    engine.submit(ask("a", Unreadable(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_work
    assert len(run_all(engine, [ask("a")])["a"].outputs[0].token_ids) == 3


def test_a_policy_that_raises_when_a_context_of_the_same_name_is_dropped_loses_no_request_and_no_page() -> None:
    policy = RaisesOnce()
    engine = small(policy)
    kept = ask("a", follow_up=FollowUp())
    engine.submit(kept)
    first = steps(engine)["a"].output.outputs[0].token_ids
    assert engine.num_retained == 1
    policy.armed = True
    for request in (replace(kept, follow_up=None), ask("b")):
        engine.submit(request)
    ended = steps(engine)
    assert [type(ended[name].failure) for name in "ab"] == [OSError, type(None)]  # b had not been opened
    assert engine.scheduler.unfinished == []
    again = run_all(engine, [ask("a"), ask("b")])
    assert {output.outputs[0].token_ids == first for output in again.values()} == {True}
