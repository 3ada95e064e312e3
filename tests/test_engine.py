"""The engine on a runner whose KV is the tokens: the same tokens whatever happens, an end for everybody, no page lost."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes import (
    POLICIES,
    VOCAB,
    FakeRunner,
    InstantEndpoints,
    ManualClock,
    make_engine,
    next_token,
    run_all,
    uninterrupted,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.engine import Engine
from jinfercept.errors import RequestError
from jinfercept.intercept.detector import ScriptedDetector, StopStringDetector
from jinfercept.kv.page import Residency
from jinfercept.request import (
    Call,
    CompletionOutput,
    Event,
    Finished,
    Intercepted,
    Request,
    RequestOutput,
    Result,
    Resumed,
    SamplingParams,
    Token,
    Tool,
)
from jinfercept.sched.plan import StepPlan, StepResult
from jinfercept.sched.policy import Policy, preserve, scripted, swap
from jinfercept.sched.sequence import State

TOOLS = {"tool": Tool(str, name="tool", max_result_tokens=50), "short": Tool(str, name="short", max_result_tokens=3)}
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def request(
    name: str, prompt: list[int], max_tokens: int = 8, calls: dict[int, list[int]] | None = None, **more: Any
) -> Request:
    """A greedy request that calls after so many generated tokens and gets these tokens back."""
    script = {count: [Call("tool", ",".join(map(str, tokens)))] for count, tokens in (calls or {}).items()}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    values: dict[str, Any] = {"tools": TOOLS, "detector": ScriptedDetector(script)} | more
    return Request(name, tuple(prompt), values.pop("params", params), **values)


def tokens_in(call: Call) -> Result:
    return Result("", token_ids=tuple(int(token) for token in call.arguments.split(",") if token))


def at_once(call: Call) -> float:
    return 0.0


def serve(
    policy: Policy,
    *,
    latency: Callable[[Call], float] = at_once,
    answer: Callable[[Call], Result] = tokens_in,
    **options: Any,
) -> Engine:
    clock = ManualClock()
    return make_engine(policy, clock=clock, endpoints=InstantEndpoints(clock, latency, answer), **options)


def only(outputs: dict[str, RequestOutput]) -> CompletionOutput:
    ((output,),) = (done.outputs for done in outputs.values())
    return output


def steps(engine: Engine, number: int = 1) -> list[Event]:
    return [event for _ in range(number) for event in engine.step()]


def until(engine: Engine, reached: Callable[[], bool]) -> list[Event]:
    events: list[Event] = []
    for _ in range(1000):
        if reached():
            return events
        events += engine.step()
    raise AssertionError("this state is never reached")


def state_of(engine: Engine, name: str) -> State | None:
    return next((sequence.state for sequence in engine.scheduler.unfinished if sequence.id == name), None)


# -- the same tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A set of requests, the machine that serves them, and how long calls take."""

    requests: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, tuple[int, ...]], ...]], ...]
    latencies: tuple[float, ...]
    options: tuple[tuple[str, Any], ...]
    places: tuple[Residency, ...]


def draw_workload(seed: int) -> Workload:
    """Prompts that share beginnings, calls anywhere, a pool that is too small, in every size of everything."""
    rng = random.Random(seed)
    page_size, num_pages = rng.choice([1, 2, 4, 8]), rng.choice([5, 8, 12, 40])
    limit = max(4, min(num_pages * page_size, rng.choice([20, 60, 1000])))
    shared = [rng.randrange(VOCAB) for _ in range(60)] * 8
    requests = []
    for _ in range(rng.choice([1, 3, 8, 16])):
        length = rng.randrange(1, limit)
        num_shared = rng.choice([length // 2, length // 2, length // 2, length])
        prompt = shared[:num_shared] + [rng.randrange(VOCAB) for _ in range(length - num_shared)]
        calls = {
            rng.randrange(1, 15): tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5, 12])))
            for _ in range(rng.randrange(4))
        }
        requests.append((tuple(prompt), rng.randrange(1, 20), tuple(calls.items())))
    options = {
        "page_size": page_size,
        "num_pages": num_pages,
        "num_host_pages": rng.choice([0, 3, 100]),
        "max_model_len": limit,
        "max_num_seqs": rng.choice([1, 2, 4]),
        "chunk_tokens": rng.choice([1, 3, 100]),
        "prefix_caching": rng.random() < 0.7,
        "link_tokens_per_s": rng.choice([1.0, 1e9]),
    }
    latencies = tuple(rng.choice([0, 0.001, 0.1]) for _ in range(7))
    places = tuple(rng.choice(list(Residency)) for _ in range(50))
    return Workload(tuple(requests), latencies, tuple(options.items()), places)


def check_same_tokens(name: str, depth: int, workload: Workload) -> None:
    """Serve the workload and compare every stream with that of an undisturbed run."""

    def placed(sequence: Any, index: int) -> Residency:
        return workload.places[(index * 7 + len(sequence.tokens)) % len(workload.places)]

    options = dict(workload.options)
    engine = serve(
        scripted(placed) if name == "scripted" else POLICIES[name](),
        latency=lambda call: workload.latencies[len(call.arguments) % len(workload.latencies)],
        depth=depth,
        **options,
    )
    requests, expected = [], {}
    for index, (prompt, max_tokens, calls) in enumerate(workload.requests):
        script = {count: list(tokens) for count, tokens in calls}
        requests.append(request(f"r{index}", list(prompt), max_tokens, script))
        expected[f"r{index}"] = uninterrupted(prompt, requests[-1].params, script, options["max_model_len"])
    outputs = run_all(engine, requests)
    assert {name: done.outputs[0].token_ids for name, done in outputs.items()} == expected
    assert all(done.outputs[0].finish_reason == "length" for done in outputs.values())


@DEPTHS
@pytest.mark.parametrize("policy", [*POLICIES, "scripted"])
@settings(max_examples=70)
@given(seed=st.integers(0, 1 << 32))
def test_every_policy_gives_the_tokens_of_an_undisturbed_run(policy: str, depth: int, seed: int) -> None:
    check_same_tokens(policy, depth, draw_workload(seed))


@pytest.mark.slow
@pytest.mark.timeout(0)
@DEPTHS
@pytest.mark.parametrize("policy", [*POLICIES, "scripted"])
@settings(max_examples=1500)
@given(seed=st.integers(0, 1 << 32))
def test_every_policy_gives_the_tokens_of_an_undisturbed_run_in_many_more_cases(
    policy: str, depth: int, seed: int
) -> None:
    check_same_tokens(policy, depth, draw_workload(seed))


@DEPTHS
@settings(max_examples=60)
@given(
    places=st.lists(st.sampled_from(Residency), min_size=7, max_size=7),
    returned=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    chunk_tokens=st.sampled_from([1, 2, 5, 100]),
    caching=st.booleans(),
)
def test_any_mix_of_residencies_gives_the_same_tokens(
    depth: int, places: list[Residency], returned: list[int], chunk_tokens: int, caching: bool
) -> None:
    """One request alone, page by page: what was found, fetched and recomputed adds up, too."""
    policy = scripted(lambda sequence, index: places[index % 7])
    engine = serve(
        policy, num_pages=12, num_host_pages=12, depth=depth, chunk_tokens=chunk_tokens, prefix_caching=caching
    )
    one = request("a", list(range(23)), 6, {3: returned})
    output = only(run_all(engine, [one]))
    assert output.token_ids == uninterrupted(one.prompt_token_ids, one.params, {3: returned}, 48)
    (interception,) = output.interceptions
    assert interception.context is not None
    assert sum(interception.context) == 25 + depth, "at depth one the call's own token has its KV"
    computed = engine.scheduler.counters
    assert computed.recomputed >= interception.context.recomputed
    assert computed.copied_in == interception.context.copied_in


@DEPTHS
@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_returning_at_once_into_a_full_pool_is_served(policy: str, depth: int) -> None:
    requests = [request(f"r{i}", [i] * 9, 12, {4: [i, i + 1], 8: [i] * 5}) for i in range(12)]
    engine = serve(POLICIES[policy](), latency=lambda call: 50.0, num_pages=13, num_host_pages=6, depth=depth)
    outputs = run_all(engine, requests)
    for i, one in enumerate(requests):
        script = {4: [i, i + 1], 8: [i] * 5}
        assert outputs[one.id].outputs[0].token_ids == uninterrupted(one.prompt_token_ids, one.params, script, 52)


@DEPTHS
@pytest.mark.parametrize("policy", POLICIES)
def test_contexts_as_large_as_the_pool_take_turns(policy: str, depth: int) -> None:
    requests = [request(f"r{i}", [i] * (20 + i), 30, {3: [i], 5: []}) for i in range(4)]
    engine = serve(POLICIES[policy](), latency=lambda call: 0.1, num_pages=8, num_host_pages=9, depth=depth)
    outputs = run_all(engine, requests)
    for i, one in enumerate(requests):
        output = outputs[one.id].outputs[0]
        assert output.token_ids == uninterrupted(one.prompt_token_ids, one.params, {3: [i], 5: []}, 32)
        assert len(one.prompt_token_ids) + len(output.token_ids) == 32


@pytest.mark.parametrize("policy", POLICIES)
def test_three_hundred_requests_in_a_tiny_pool_all_end(policy: str) -> None:
    rng = random.Random(7)
    requests = [
        request(f"r{i}", [rng.randrange(5) for _ in range(rng.randrange(1, 14))], 4, {1 + i % 4: [i % 7] * (i % 3)})
        for i in range(300)
    ]
    engine = serve(POLICIES[policy](), latency=lambda call: 0.05, num_pages=6, num_host_pages=4, depth=1)
    outputs = run_all(engine, requests)
    assert len(outputs) == 300
    assert {done.outputs[0].num_generated for done in outputs.values()} == {4}


# -- abort -------------------------------------------------------------------------------------------------------------


def aborted(engine: Engine, name: str) -> CompletionOutput:
    """Abort, and what comes of it in the very next step."""
    engine.abort(name)
    ends = [event for event in engine.step() if isinstance(event, Finished) and event.request_id == name]
    assert state_of(engine, name) is None
    return ends[0].output.outputs[0]


def assert_only_others_own_pages(engine: Engine) -> None:
    occupancy = engine.scheduler.kv.store.occupancy()
    held = {page for sequence in engine.scheduler.unfinished for page in sequence.context.pages if page.device}
    assert occupancy.used + occupancy.claimed == len(held)


@DEPTHS
def test_abort_before_the_first_step(depth: int) -> None:
    engine = serve(preserve(), num_pages=8, depth=depth)
    engine.submit(request("a", [1, 2, 3]))
    output = aborted(engine, "a")
    assert (output.finish_reason, output.token_ids) == ("abort", [])
    assert not engine.has_work


@DEPTHS
@pytest.mark.parametrize("policy", [preserve, swap])
@pytest.mark.parametrize("state", ["running", "intercepted", "returned", "preempted", "waiting"])
def test_abort_frees_the_pages_at_once(state: str, policy: Callable[[], Policy], depth: int) -> None:
    latency_s, max_num_seqs = (0.001, 1) if state == "returned" else (1.0, 2)  # it returns while another one runs
    engine = serve(policy(), latency=lambda call: latency_s, num_pages=8, max_num_seqs=max_num_seqs, depth=depth)
    others = [request("other", [1] * 9, 20), request("last", [2] * 5, 15)]
    one = request("a", [3] * 13, 15, {2: [7]} if state in ("intercepted", "returned") else {})
    for each in (others[0], one, others[1]):
        engine.submit(each)
    name = "last" if state == "waiting" else "a"
    for wanted in {
        "running": [State.RUNNING],
        "intercepted": [State.INTERCEPTED],
        "returned": [State.INTERCEPTED, State.WAITING],
        "preempted": [State.RUNNING, State.WAITING],
        "waiting": [State.WAITING],
    }[state]:
        until(engine, lambda wanted=wanted: state_of(engine, name) is wanted)
    assert aborted(engine, name).finish_reason == "abort"
    assert_only_others_own_pages(engine)
    outputs = run_all(engine, [])
    for other in others:
        if other.id in outputs:
            expected = uninterrupted(other.prompt_token_ids, other.params, {}, 32)
            assert outputs[other.id].outputs[0].token_ids == expected
    assert engine.scheduler.kv.check([]) is None


@DEPTHS
def test_abort_while_pages_land_frees_them(depth: int) -> None:
    engine = serve(swap(), latency=lambda call: 1.0, num_pages=8, num_host_pages=8, depth=depth)
    engine.submit(request("a", [1] * 13, 9, {2: [5, 6]}))
    until(engine, lambda: state_of(engine, "a") is State.INTERCEPTED)
    runner: FakeRunner = engine._runner  # pyright: ignore
    until(engine, lambda: bool(runner.plans[-1].land))
    assert aborted(engine, "a").finish_reason == "abort"
    assert engine.scheduler.kv.store.occupancy().used == 0
    again = request("b", [1] * 13, 9)
    assert only(run_all(engine, [again])).token_ids == uninterrupted((1,) * 13, again.params, {}, 32)


@DEPTHS
def test_random_aborts_leave_the_others_tokens_alone(depth: int) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        policy = rng.choice(list(POLICIES.values()))()
        engine = serve(policy, latency=lambda call: 0.01, num_pages=9, num_host_pages=5, depth=depth)
        script = {2: [4, 5], 6: [6] * 3}
        requests = [request(f"r{i}", [1] * 4 + [i] * (i % 7), 10, script) for i in range(10)]
        for one in requests:
            engine.submit(one)
        outputs: dict[str, CompletionOutput] = {}
        for _ in range(3000):
            if rng.random() < 0.1:
                engine.abort(f"r{rng.randrange(10)}")
            for event in engine.step():
                if isinstance(event, Finished):
                    outputs[event.request_id] = event.output.outputs[0]
            if not engine.has_work:
                break
        assert len(outputs) == 10
        for one in requests:
            expected = uninterrupted(one.prompt_token_ids, one.params, script, 36)
            got = outputs[one.id]
            assert got.token_ids == expected[: len(got.token_ids)]
            assert got.finish_reason == "abort" or got.token_ids == expected
        assert sum(engine.scheduler.kv.store.occupancy()[1:3]) == 0


def test_aborting_who_is_not_there_is_nothing() -> None:
    engine = serve(preserve(), num_pages=8)
    engine.abort("nobody")
    assert steps(engine) == []
    run_all(engine, [request("a", [1])])
    engine.abort("a")
    assert steps(engine) == []


def test_closing_gives_everybody_up() -> None:
    engine = serve(preserve(), latency=lambda call: 1.0, num_pages=8, depth=1)
    for name in ("a", "b", "c"):
        engine.submit(request(name, [1, 2], 9, {3: [1]}))
    steps(engine, 3)
    engine.submit(request("still in the inbox", [1]))
    engine.close()
    assert sum(engine.scheduler.kv.store.occupancy()[1:3]) == 0
    assert engine.scheduler.num_unfinished == 0
    assert not engine.has_work


# -- a failed step -----------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 8])
def test_a_failed_step_ends_all_requests_loudly_and_the_next_one_is_served_correctly(depth: int, fail_at: int) -> None:
    runner = FakeRunner(4, (4, 16), fail_at=fail_at)
    engine = serve(swap(), latency=lambda call: 0.01, num_pages=10, num_host_pages=9, depth=depth, runner=runner)
    prompt = [5] * 9
    failed = run_all(engine, [request(f"r{i}", prompt, 9, {2: [1, 2]}) for i in range(3)])
    for done in failed.values():
        assert (done.outputs[0].finish_reason, done.outputs[0].stop_reason) == (
            "error",
            "RuntimeError: the device is gone",
        )
    assert engine.scheduler.kv.store.num_free == 10
    assert engine.scheduler.kv.store.num_host_used == 0
    again = request("r0", prompt, 9, {2: [1, 2]})
    output = only(run_all(engine, [again]))
    assert output.token_ids == uninterrupted(again.prompt_token_ids, again.params, {2: [1, 2]}, 40)


class Lost(FakeRunner):
    """Fails when a result is collected, as a real device does."""

    def collect(self, ticket: StepResult) -> StepResult:
        if len(self.plans) == 4:
            self.plans.append(StepPlan(-1, 0))
            raise RuntimeError("the result is lost")
        return ticket


@DEPTHS
def test_a_result_that_cannot_be_read_is_a_failed_step(depth: int) -> None:
    engine = serve(preserve(), num_pages=10, depth=depth, runner=Lost(4, (4, 16)))
    outputs = run_all(engine, [request("a", [1] * 9, 9), request("b", [2] * 9, 9)])
    assert {done.outputs[0].stop_reason for done in outputs.values()} == {"RuntimeError: the result is lost"}
    again = request("a", [1] * 9, 9)
    assert only(run_all(engine, [again])).token_ids == uninterrupted((1,) * 9, again.params, {}, 40)


# -- ends --------------------------------------------------------------------------------------------------------------


def undisturbed(prompt: list[int], number: int) -> list[int]:
    return uninterrupted(tuple(prompt), SamplingParams(temperature=0, max_tokens=number), {}, 1000)


@DEPTHS
def test_a_stop_token_ends_the_request_and_is_in_the_stream(depth: int) -> None:
    stream = undisturbed([1, 2], 12)
    stop = stream[5]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    output = only(run_all(serve(preserve(), num_pages=9, depth=depth), [request("a", [1, 2], params=params)]))
    assert output.token_ids == stream[: stream.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@DEPTHS
def test_an_end_of_text_token_ends_the_request_unless_it_is_ignored(depth: int) -> None:
    stream = undisturbed([1, 2], 12)
    eos = stream[5]
    params = SamplingParams(temperature=0, max_tokens=12)
    for ignore in (False, True):
        engine = serve(preserve(), num_pages=9, depth=depth, eos_token_ids=(eos,))
        output = only(run_all(engine, [request("a", [1, 2], params=replace(params, ignore_eos=ignore))]))
        assert output.token_ids == (stream if ignore else stream[: stream.index(eos) + 1])
        assert (output.finish_reason, output.stop_reason) == ("length" if ignore else "stop", None)


@DEPTHS
def test_the_last_token_allowed_makes_no_call(depth: int) -> None:
    engine = serve(preserve(), num_pages=9, depth=depth)
    output = only(run_all(engine, [request("a", [1, 2], 5, {5: [9]})]))
    assert (output.finish_reason, output.interceptions, output.num_generated) == ("length", (), 5)


@DEPTHS
def test_tokens_returned_by_tools_do_not_count_as_generated(depth: int) -> None:
    engine = serve(preserve(), num_pages=19, depth=depth)
    output = only(run_all(engine, [request("a", [1, 2], 5, {1: [9] * 8, 4: [8] * 3})]))
    assert output.num_generated == 5
    assert len(output.token_ids) == 16
    assert [interception.span for interception in output.interceptions] == [(1, 9), (12, 15)]
    assert output.token_ids[1:9] == [9] * 8
    assert [call.span for interception in output.interceptions for call in interception.calls] == [(0, 1), (11, 12)]


@DEPTHS
def test_a_call_costs_at_most_one_wasted_sample(depth: int) -> None:
    runner = FakeRunner(4, (4, 16))
    engine = serve(preserve(), latency=lambda call: 1.0, num_pages=19, depth=depth, runner=runner)
    run_all(engine, [request("a", [1, 2], 9, {3: [9], 6: []})])
    sampled = sum(chunk.sample is not None for plan in runner.plans for chunk in plan.chunks)
    assert sampled == 9 + 2 * depth


@DEPTHS
def test_a_result_that_does_not_fit_the_sequence_is_cut_and_one_more_token_follows(depth: int) -> None:
    engine = serve(preserve(), num_pages=5, depth=depth)
    output = only(run_all(engine, [request("a", [1] * 10, 50, {2: [9] * 30})]))
    assert len(output.token_ids) == 10
    assert output.token_ids[2:9] == [9] * 7
    assert output.interceptions[0].results[0].status == "too_large"
    assert output.finish_reason == "length"


def test_a_result_that_finds_no_room_at_all_is_empty() -> None:
    engine = serve(preserve(), num_pages=3)
    output = only(run_all(engine, [request("a", [1] * 10, 50, {1: [9] * 30})]))
    assert (len(output.token_ids), output.interceptions[0].span) == (2, (1, 1))


# -- calls -------------------------------------------------------------------------------------------------------------


@DEPTHS
def test_several_calls_of_one_turn_return_together_in_order(depth: int) -> None:
    calls = [Call("tool", "1,2"), Call("tool", ""), Call("tool", "3")]
    engine = serve(preserve(), latency=lambda call: float(len(call.arguments)), num_pages=9, depth=depth)
    engine.submit(request("a", [1], 4, detector=ScriptedDetector({2: calls})))
    events = until(engine, lambda: not engine.has_work)
    (paused,) = [event for event in events if isinstance(event, Intercepted)]
    (resumed,) = [event for event in events if isinstance(event, Resumed)]
    assert [call.arguments for call in paused.calls] == ["1,2", "", "3"]
    assert resumed.token_ids == (1, 2, 3)
    assert [result.token_ids for result in resumed.results] == [(1, 2), (), (3,)]
    (output,) = [event.output.outputs[0] for event in events if isinstance(event, Finished)]
    assert output.interceptions[0].span == (2, 5)
    assert output.interceptions[0].duration_s >= 3


def test_events_tell_the_whole_stream_in_order() -> None:
    engine = serve(preserve(), num_pages=9)
    engine.submit(request("a", [1], 5, {2: [7, 8], 3: []}))
    stream: list[int] = []
    kinds = []
    for event in until(engine, lambda: not engine.has_work):
        kinds.append(type(event).__name__[0])
        if isinstance(event, Token):
            stream.append(event.token_id)
        elif isinstance(event, Resumed):
            stream += event.token_ids
        elif isinstance(event, Finished):
            assert event.output.outputs[0].token_ids == stream
    assert "".join(kinds) == "TTIRTIRTTF"


@pytest.mark.parametrize(("policy", "use"), [("preserve", (11, 0, 0)), ("swap", (0, 11, 0)), ("discard", (0, 0, 11))])
def test_an_interception_tells_what_became_of_the_context(policy: str, use: tuple[int, int, int]) -> None:
    engine = serve(POLICIES[policy](), latency=lambda call: 1.0, num_pages=9, num_host_pages=9)
    outputs = run_all(engine, [request("a", [1] * 9, 5, {3: [7, 8]})])
    assert only(outputs).interceptions[0].context == use
    metrics = outputs["a"].metrics
    assert (metrics.copied_in_tokens, metrics.recomputed_tokens) == use[1:]
    assert metrics.intercepted_s >= 1


def texts(characters: str, **options: Any) -> dict[str, Any]:
    """An encoding for results: a token per character."""
    return {"encode": lambda text: [ord(character) % VOCAB for character in text], **options}


def decoded(tokens: list[int]) -> str:
    return "".join(chr(token if token >= 32 else token + VOCAB) for token in tokens)


def ask(tool: Tool, text: str, **options: Any) -> tuple[str, Result]:
    """What the model reads when a tool returns `text`, and the result as reported."""
    engine = serve(preserve(), answer=lambda call: Result(text), num_pages=60, **texts(""), **options)
    one = request("a", [1], 4, detector=ScriptedDetector({2: [Call("t", "")]}), tools={"t": tool})
    (interception,) = only(run_all(engine, [one])).interceptions
    first, end = interception.span
    (done,) = interception.results
    return decoded(run_all_stream(engine, one)[first:end]), done


def run_all_stream(engine: Engine, one: Request) -> list[int]:
    return only(run_all(engine, [replace(one, id="again")])).token_ids


def test_a_text_goes_into_its_template() -> None:
    assert ask(Tool(str, name="t", result="<{}>"), "four") == ("<four>", Result("four"))


def test_an_oversized_text_is_cut_says_so_and_keeps_the_template_around_it() -> None:
    tool = Tool(str, name="t", result="<{}>", max_result_tokens=60)
    for length in (59, 60, 500, 100_000):
        read, result = ask(tool, "x" * length)
        assert (len(read), result.status) == (60, "too_large")
        assert read.startswith("<xxx")
        assert read.endswith(" ... (cut: longer than 60 tokens)>")
    assert ask(tool, "x" * 58)[1].status == "ok"


def test_a_text_for_which_not_even_the_note_has_room_is_cut_all_the_same() -> None:
    read, result = ask(Tool(str, name="t", max_result_tokens=5), "x" * 50)
    assert (len(read), result.status) == (5, "too_large")


def test_token_ids_that_are_none_are_left_out_and_reported() -> None:
    for given_ids, kept, status in (
        ((5, 6), [5, 6], "ok"),
        ((5, -1, 6, VOCAB, 10**30), [5, 6], "error"),
        ((5,) * 60, [5] * 50, "too_large"),
    ):
        engine = serve(preserve(), answer=lambda call, ids=given_ids: Result("", token_ids=ids), num_pages=40)
        output = only(run_all(engine, [request("a", [1], 4, {2: [0]})]))
        first, end = output.interceptions[0].span
        assert output.token_ids[first:end] == kept
        assert output.interceptions[0].results[0].status == status


def test_without_a_tokenizer_a_text_adds_no_tokens() -> None:
    engine = serve(preserve(), answer=lambda call: Result("a text"), num_pages=40)
    output = only(run_all(engine, [request("a", [1], 4, {2: [0]})]))
    assert output.token_ids == undisturbed([1], 4)


class Letters:
    """A text of one letter per token, without stop strings."""

    def __init__(self) -> None:
        self.last_raw = ""
        self.stopped: str | None = None
        self.text = ""

    def add(self, token_id: int) -> str:
        self.last_raw = decoded([token_id])
        self.text += self.last_raw
        return self.last_raw

    def inject(self, token_ids: list[int]) -> str:
        self.last_raw = ""
        self.text += decoded(token_ids)
        return decoded(token_ids)

    def finish(self) -> str:
        return ""


@DEPTHS
def test_calls_are_found_in_what_the_model_writes_and_not_in_what_tools_return(depth: int) -> None:
    stream = undisturbed([1], 8)
    start, stop = decoded(stream[1:3]), decoded(stream[4:5])
    tool = Tool(str, name="t", start=start, stop=stop)
    engine = serve(
        preserve(),
        answer=lambda call: Result(start + "inside" + stop),
        num_pages=40,
        depth=depth,
        open_text=lambda one: Letters(),
        **texts(""),
    )
    one = request("a", [1], 5, detector=StopStringDetector([tool]), tools={"t": tool})
    output = only(run_all(engine, [replace(one, params=replace(one.params, max_tokens=8))]))
    assert output.interceptions[0].calls == (Call("t", decoded(stream[3:4]), (1, 5)),)
    assert output.text == decoded(output.token_ids)
    assert output.text[5:].startswith(start + "inside" + stop)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([], "none"),
        ([1] * 32, "32 tokens"),
        ([1, VOCAB], str(VOCAB)),
        ([-1], "-1"),
        ([1.5], "1.5"),
        (["a"], "a"),
        ([None], "None"),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused(prompt: list[Any], word: str) -> None:
    engine = serve(preserve(), num_pages=8)
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", prompt))
    assert word in str(caught.value.got)
    assert caught.value.fix
    assert not engine.has_work
    run_all(engine, [request("a", [1])])


def test_the_longest_prompt_gets_its_one_token() -> None:
    output = only(run_all(serve(preserve(), num_pages=8), [request("a", [1] * 31)]))
    assert (output.finish_reason, output.token_ids) == ("length", [next_token([1] * 31)])


def test_an_id_is_refused_while_its_first_request_lives_and_free_afterwards() -> None:
    engine = serve(preserve(), num_pages=8)
    engine.submit(request("a", [1]))
    with pytest.raises(RequestError, match="not finished"):
        engine.submit(request("a", [2]))
    run_all(engine, [])
    assert len(run_all(engine, [request("a", [2])])) == 1


def test_a_request_without_a_seed_gets_one_of_its_own_that_repeats() -> None:
    def seeds() -> list[int]:
        runner = FakeRunner(4, (4, 16))
        engine = serve(preserve(), num_pages=8, runner=runner)
        params = SamplingParams(temperature=1.0, max_tokens=1)
        run_all(engine, [request(name, [1], params=params) for name in "ab"])
        run_all(engine, [request("c", [1], params=replace(params, seed=-5))])
        return [chunk.sample.seed for plan in runner.plans for chunk in plan.chunks if chunk.sample]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3
    assert seeds()[2] == (-5) & 0xFFFFFFFF
