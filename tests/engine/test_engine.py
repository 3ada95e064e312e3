"""The engine on a runner whose KV is the tokens: how requests end, what calls give them, and what is refused."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import check_request
from jinfercept.engine.session import random_key
from jinfercept.errors import RequestError
from jinfercept.events import Finished, Token
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import StepPlan, StepResult
from jinfercept.sched.policy import preserve
from jinfercept.sched.scheduler import Scheduler
from tests.support.engine_requests import DEPTHS, only, request, serve
from tests.support.fake_engine import (
    POLICIES,
    VOCAB,
    FakeRunner,
    next_token,
    run_all,
    uninterrupted,
)

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


def test_many_requests_that_come_and_go_at_once_hold_up_neither_a_running_one_nor_an_abort() -> None:
    engine = serve(preserve(), num_pages=40)
    for name in ("runs", "leaves"):
        engine.submit(request(name, [1, 2], 60))
    engine.step()
    names = [f"r{number}" for number in range(400)]
    for name in names:
        engine.submit(request(name, [3, 4], 1))
    engine.abort("leaves")
    most, ended = 0, list[str]()
    for abort in (False, True):
        if abort:
            for name in names:
                engine.abort(name)
        for _ in range(20):
            before = len(engine.scheduler.unfinished)
            events = engine.step()
            most = max(most, abs(len(engine.scheduler.unfinished) - before))
            ended += [event.request_id for event in events if isinstance(event, Finished)]
            assert any(isinstance(event, Token) and event.request_id == "runs" for event in events)
            assert "leaves" in ended, "its pages are free within a step"
    assert most < 100
    assert {*ended} == {*names, "leaves"}


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
    single = request("a", [1], 4, detector=ScriptedDetector({2: [Call("t", "")]}), tools={"t": tool})
    (interception,) = only(run_all(engine, [single])).interceptions
    first, end = interception.span
    (done,) = interception.results
    return decoded(run_all_stream(engine, single)[first:end]), done


def run_all_stream(engine: Engine, single: Request) -> list[int]:
    return only(run_all(engine, [replace(single, id="again")])).token_ids


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


def test_what_closes_a_result_is_there_though_there_is_no_room_for_the_note() -> None:
    for most, expected in ((8, "<< ...>>"), (4, "<<>>"), (3, "<<>")):
        read, result = ask(Tool(str, name="t", result="<<{}>>", max_result_tokens=most), "x" * 500)
        assert (read, result.status) == (expected, "too_large")


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
    with pytest.raises(RequestError, match="an unfinished request already has this id"):
        engine.submit(request("a", [2]))
    run_all(engine, [])
    assert len(run_all(engine, [request("a", [2])])) == 1


def test_a_request_without_a_seed_has_random_numbers_of_its_own_that_repeat() -> None:
    def random_keys() -> list[int]:
        runner = FakeRunner(4, (4, 16))
        engine = serve(preserve(), num_pages=8, runner=runner)
        params = SamplingParams(temperature=1.0, max_tokens=1)
        run_all(engine, [request(name, [1], params=params) for name in "ab"])
        run_all(engine, [request("c", [1], params=replace(params, seed=-5))])
        return [chunk.sample.random_key for plan in runner.plans for chunk in plan.chunks if chunk.sample]

    assert random_keys() == random_keys()
    assert len(set(random_keys())) == 3
    assert random_keys()[2] == random_key(-5, (1,), 0)


class ArrivalInAStep(FakeRunner):
    """While the third step runs, a request arrives."""

    def __init__(self) -> None:
        super().__init__(4, (4, 16))
        self.engine: Engine | None = None
        self.widths: list[int] = []  # chunks of every plan
        self.collected = 0

    def forward(self, plan: StepPlan) -> Any:
        self.widths.append(len(plan.chunks))
        return super().forward(plan)

    def collect(self, ticket: Any) -> StepResult:
        self.collected += 1
        if self.collected == 3 and self.engine is not None:
            self.engine.submit(request("b", [3, 4], 2))
        return super().collect(ticket)


@pytest.mark.parametrize(("waits", "plans_behind"), [(False, 2), (True, 1)])
def test_an_arrival_is_in_the_plan_behind_the_step_that_runs_only_while_a_tenant_is_ahead(
    waits: bool, plans_behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "waits", waits)
    runner = ArrivalInAStep()
    runner.engine = engine = serve(preserve(), num_pages=9, depth=1, runner=runner)
    run_all(engine, [request("a", [1, 2], 12)])
    assert runner.widths.index(2) - 2 == plans_behind


def check(ids: Sequence[int], **fields: Any) -> None:
    check_request(Request("request", ids, SamplingParams(), **fields), 10, 100)


@pytest.mark.parametrize("ids", [(10,), [-1], array("i", [10]), array("i", [0, -1]), (1.0,)])
@pytest.mark.parametrize("fields", [{}, {"ids_below": 11}])
def test_ids_outside_the_vocabulary_are_refused_unless_they_are_known_to_be_in_it(ids: Any, fields: Any) -> None:
    with pytest.raises(RequestError, match="from 0 to 9"):
        check(ids, **fields)
