"""What users are told when the engine fails, and how they get a new one; policies and recorders that cannot work."""

import asyncio
import collections.abc
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jinfercept import LLM, ConfigError, EngineError, RequestError, SamplingParams
from jinfercept.config import SchedulingOptions
from jinfercept.engine.engine import Engine
from jinfercept.events import Event, Finished
from jinfercept.request import FollowUp, Request
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policy import Move, Policy
from jinfercept.sched.sequence import Sequence
from tests.support.engine_state import engine_state
from tests.support.fake_engine import POLICIES, ManualClock, make_engine, run_all
from tests.support.pretend import failing_counts, failing_steps
from tests.support.tiny_model import tiny_llm, tiny_setup

SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT: Any = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def _tiny() -> Iterator[LLM]:
    with tiny_llm(kv_tokens=256, max_model_len=64) as llm:
        yield llm


@pytest.fixture
def llm(_tiny: LLM) -> LLM:
    # by name: a restart keeps the class of an earlier test
    _tiny.restart(policy=SchedulingOptions.policy, estimator=SchedulingOptions.estimator)
    return _tiny


class Breaks:
    """A policy of the right shape that raises when a request ends, also when the engine is rebuilt."""

    requeues_at_tail = protects_paused = synchronous = False

    def pause(self, sequence: Sequence, now: float) -> None: ...

    def wait(self, sequence: Sequence) -> None: ...

    def __init__(self) -> None:
        self.num_resumed = 0

    def resume(self, sequence: Sequence, now: float) -> None:
        self.num_resumed += 1
        raise OSError(f"resume {self.num_resumed}")

    def moves(self, budget: object, now: float, mover: object) -> None: ...

    def victims(self, now: float) -> Iterator[Move]:
        return iter(())

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return iter(())

    def admits(self, sequence: Sequence, now: float) -> bool:
        return True


class TakesTooFew(Breaks):
    def resume(self, sequence: Sequence) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@pytest.mark.parametrize(
    "policy",
    [LeastRecentlyUsed, 5, object(), TakesTooFew, TakesTooFew()],
    ids=lambda policy: getattr(policy, "__name__", type(policy).__name__),
)
def test_a_policy_of_the_wrong_shape_is_refused_and_the_llm_serves_on(llm: LLM, policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"policy.*fix: "):
        llm.restart(policy=policy)
    [output] = llm.generate(PROMPT, SHORT)
    assert output.outputs[0].finish_reason == "length"


def test_a_restart_names_the_option_that_is_nearest(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"no such option; got estimater \(did you mean 'estimator'"):
        llm.restart(estimater="elapsed")  # pyright: ignore[reportCallIssue] # no such option


def test_a_new_llm_refuses_a_policy_and_a_profile_of_the_wrong_shape_before_it_loads() -> None:
    wrongs: list[dict[str, Any]] = [{"policy": LeastRecentlyUsed}, {"policy": 5}, {"estimator": 5}, {"profile": 5}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LLM("no/such/model", **wrong)


def test_an_engine_that_cannot_be_rebuilt_says_what_failed_until_a_restart(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    llm.restart(policy=Breaks())
    for _ in range(2):
        with pytest.raises(EngineError, match=r"the policy Breaks raises OSError: resume 1 in resume .*restart"):
            llm.generate(PROMPT, SHORT)
    with pytest.raises(EngineError, match="OSError: resume 1 in resume"):
        llm.stream(PROMPT, SHORT)
    llm.restart()
    assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == expected


class BreaksInAPlan(Breaks):
    """Raises in its second plan only, and ends requests as it should."""

    def __init__(self) -> None:
        self.num_plans = 0

    def resume(self, sequence: Sequence, now: float) -> None: ...

    def moves(self, budget: object, now: float, mover: object) -> None:
        self.num_plans += 1
        if self.num_plans == 2:
            raise KeyError("moves")


class Interrupts(BreaksInAPlan):
    """The same with what `KeyboardInterrupt` of the user is on the main thread."""

    def moves(self, budget: object, now: float, mover: object) -> None:
        self.num_plans += 1
        if self.num_plans == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (BreaksInAPlan, r"the policy BreaksInAPlan raises KeyError: 'moves' in moves"),
        (Interrupts, r"the policy Interrupts raises KeyboardInterrupt: +in moves"),
    ],
)
def test_a_policy_that_raises_in_a_plan_costs_the_requests_of_that_plan_alone(
    llm: LLM, policy: type[BreaksInAPlan], message: str
) -> None:
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    llm.restart(policy=policy, estimator=ElapsedEstimator)
    with pytest.raises(EngineError, match=f"PluginError: {message}"):
        llm.generate(PROMPT, SHORT)
    assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == expected
    llm.engine.check_pages()


def test_what_counts_events_may_fail_and_a_restart_mends_it(llm: LLM) -> None:
    with failing_counts():
        llm.restart()
        engine_state(llm)  # an engine that nothing is asked of counts nothing
    for _ in range(2):
        with pytest.raises(EngineError, match="ArithmeticError: cannot count"):
            llm.generate(PROMPT, SHORT)
    llm.restart()
    assert llm.generate(PROMPT, SHORT)[0].outputs[0].finish_reason == "length"


def test_a_step_that_fails_raises_with_the_outputs_that_are_complete(llm: LLM) -> None:
    for serve in (
        lambda: llm.generate([PROMPT, PROMPT], [SHORT, LONG]),
        lambda: asyncio.run(llm.agenerate([PROMPT, PROMPT], [SHORT, LONG])),
    ):
        lost_words = "RuntimeError: the device is gone; 1 of 2 requests are lost"
        with failing_steps(after=12), pytest.raises(EngineError, match=lost_words) as raised:
            serve()
        done, lost = raised.value.outputs
        assert lost is None
        assert done is not None
        assert (done.outputs[0].finish_reason, len(done.outputs[0].token_ids)) == ("length", 2)
        assert isinstance(raised.value.__cause__, RuntimeError)
        assert len(llm.generate(PROMPT, SHORT)) == 1  # the engine has recovered by itself


def test_a_stream_ends_with_the_failure_after_the_finish_of_each_request(llm: LLM) -> None:
    events: list[Any] = []
    with failing_steps(6, SystemExit), pytest.raises(EngineError, match="the device is gone"):
        events.extend(llm.stream(PROMPT, LONG))  # keeps what came before
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.output.outputs[0].finish_reason, type(last.failure)) == ("error", SystemExit)
    assert llm.generate(PROMPT, SHORT)[0].outputs[0].finish_reason == "length"


def test_after_close_every_method_says_that_the_llm_is_closed() -> None:
    setup = tiny_setup(kv_tokens=256, max_model_len=64)
    llm, params = LLM(setup), setup.runner.params
    llm.close()
    for call in (
        lambda: llm.generate(PROMPT),
        lambda: llm.stream(PROMPT),
        lambda: asyncio.run(llm.agenerate(PROMPT)),
        lambda: llm.restart(),
        lambda: llm.restart(policy="swap"),
        lambda: llm.update_weights(params),
        lambda: llm.__enter__(),
    ):
        with pytest.raises(RequestError, match=r"this LLM is closed; .*fix: make a new one"):
            call()
    llm.close()


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_gets_an_error_and_no_hang(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            messages = []
            for call in (
                lambda: llm.generate(PROMPT),
                lambda: llm.restart(),
                stream.close,
                lambda: list(stream),
                llm.close,
            ):
                try:
                    call()
                except RequestError as error:
                    messages.append(str(error))
            os.write(writer, "|".join(messages).encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], 60)[0], "the child hangs"
        messages = os.read(reader, 10_000).decode().split("|")
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(messages) == 4
    assert all("only in the process that made it" in message for message in messages)
    assert len([event for event in stream if isinstance(event, Finished)]) == 1


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
