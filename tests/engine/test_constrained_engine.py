"""Constrained requests on a runner whose KV is the tokens: a constraint is told of every token of its text, once, in order."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.engine import Engine
from jinfercept.errors import RequestError
from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.engine_requests import DEPTHS
from tests.support.fake_engine import (
    POLICIES,
    VOCAB,
    FakeRunner,
    InstantDispatcher,
    ManualClock,
    make_engine,
    next_token,
    run_all,
)
from tests.support.fake_runner import FakeForward

EOS = (0, 5)
TOOLS = {"tool": Tool(str, name="tool")}


@dataclass(frozen=True)
class Counting:
    """A text's token number `n` is `n` modulo 7; it may end after `least` tokens and has to after `most`.

    A `late` one notices that it has to only when it is asked what may follow.
    """

    least: int
    most: int
    late: bool = False

    def constrain(self, end_token_ids: frozenset[int]) -> "Count":
        return Count(self, end_token_ids)


class Count:
    def __init__(self, grammar: Counting, end: frozenset[int]) -> None:
        self.grammar, self.end, self.count, self.ended = grammar, end, 0, False

    def allowed(self) -> list[int]:
        words = [0] * (VOCAB // 32 + 1)
        self.ended = self.ended or self.count == self.grammar.most
        following = () if self.ended else (v for v in range(VOCAB) if v not in EOS and v % 7 == self.count % 7)
        for token in (*following, *(self.end if self.ended or self.count >= self.grammar.least else ())):
            words[token // 32] |= 1 << token % 32
        return words

    def accept(self, token_id: int) -> None:
        assert not self.ended or token_id in self.end
        if token_id in self.end:
            assert self.count >= self.grammar.least
            self.ended = True
        else:
            assert token_id % 7 == self.count % 7, "a token was counted twice, or not at all"
            self.count += 1
            self.ended = self.count == self.grammar.most and not self.grammar.late


class Broken:
    """A grammar that gets stuck after two tokens."""

    def constrain(self, end_token_ids: frozenset[int]) -> "Broken":
        self.count, self.ended = 0, False
        return self

    def allowed(self) -> list[int]:
        if self.count == 2:
            raise RequestError("stuck", got="two tokens", fix="none")
        return [0xFFFFFFFF] * 4

    def accept(self, token_id: int) -> None:
        self.count += 1


class Noting(FakeRunner):
    """Notes when the phases of plans are dispatched, and when plans are collected."""

    def __init__(self, page_size: int, buckets: tuple[int, ...]) -> None:
        super().__init__(page_size, buckets)
        self.log: list[str] = []

    def forward(self, plan: StepPlan) -> FakeForward:
        self.log.append("forward")
        return super().forward(plan)

    def sample(self, forward: FakeForward, masks: Masks) -> StepResult:
        self.log.append("sample")
        return super().sample(forward, masks)

    def collect(self, ticket: StepResult) -> StepResult:
        self.log.append("collect")
        return super().collect(ticket)


def request(name: str, grammar: Any = None, calls: dict[int, list[int]] | None = None, **more: Any) -> Request:
    script = {count: [Call("tool", ",".join(map(str, tokens)))] for count, tokens in (calls or {}).items()}
    prompt = more.pop("prompt", (1, 2, 3, sum(name.encode()) % VOCAB))
    options: dict[str, Any] = {"max_tokens": 20} | more
    params = SamplingParams(temperature=0, **options)
    detector = ScriptedDetector(script) if calls is not None else None
    return Request(name, prompt, params, TOOLS, detector, grammar=grammar)


def alone(constrained: Request, limit: int) -> tuple[list[int], str]:
    """The stream, and why it ends, of a request that nothing disturbs."""
    params = constrained.params
    end = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else EOS)
    grammar, context, stream, generated = constrained.grammar, list(constrained.prompt_token_ids), [], 0
    constraint = grammar.constrain(end) if grammar else None
    script = constrained.detector.script if isinstance(constrained.detector, ScriptedDetector) else {}
    while True:
        words = constraint.allowed() if constraint else None
        if constraint and constraint.ended and not (constrained.detector and end):
            return stream, "stop"
        token = next_token(context, words)
        if constraint:
            constraint.accept(token)
        context.append(token)
        stream.append(token)
        generated += 1
        calls = script.get(generated, ())
        if token in end and not (calls and token in EOS):
            return stream, "stop"
        if constraint and constraint.ended and not calls and not (constrained.detector and end):
            return stream, "stop"
        if generated == params.max_tokens or len(context) >= limit:
            return stream, "length"
        if calls:
            returned = [int(token) for token in calls[0].arguments.split(",") if token][: limit - len(context) - 1]
            context += returned
            stream += returned
            if grammar and constraint and constraint.ended:
                constraint = grammar.constrain(end)


def engine_of(policy: str = "preserve", **options: Any) -> Engine:
    """Calls return the tokens that they name, after up to 20 ms."""
    clock = ManualClock()
    dispatcher = InstantDispatcher(
        clock,
        lambda call: 0.01 * (len(call.arguments) % 3),
        lambda call: Result("", token_ids=tuple(int(token) for token in call.arguments.split(",") if token)),
    )
    options = {"num_pages": 40, "eos_token_ids": EOS} | options
    return make_engine(POLICIES[policy](), clock=clock, dispatcher=dispatcher, **options)


def check(outputs: dict[str, RequestOutput], requests: list[Request], limit: int) -> list[CompletionOutput]:
    """Each request wrote what it writes alone."""
    completions = [outputs[constrained.id].outputs[0] for constrained in requests]
    for constrained, completion in zip(requests, completions, strict=True):
        assert (completion.token_ids, completion.finish_reason) == alone(constrained, limit)
    return completions


@DEPTHS
def test_a_model_without_end_tokens_ends_with_the_grammar(depth: int) -> None:
    engine = engine_of(depth=depth, eos_token_ids=())
    output = run_all(engine, [request("one", Counting(2, 6))])["one"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "stop")


@DEPTHS
@pytest.mark.parametrize(
    ("at", "options"),
    [(4, {}), (4, {"ignore_eos": True}), (5, {})],
    ids=["its last token", "its last token, without end tokens", "an end token"],
)
def test_a_text_that_a_call_ends_begins_anew_after_it(at: int, options: dict[str, Any], depth: int) -> None:
    constrained = request("one", Counting(4, 4), {at: [90]}, **options)
    (output,) = check(run_all(engine_of(depth=depth), [constrained]), [constrained], limit=160)
    assert [token % 7 for token in output.token_ids[at + 1 : at + 5]] == [0, 1, 2, 3]
    assert output.finish_reason == "stop"
    assert len(output.interceptions) == 1


@DEPTHS
def test_a_constraint_that_cannot_go_on_ends_its_request_and_no_other(depth: int) -> None:
    other = request("other", Counting(9, 9))
    outputs = run_all(engine_of(depth=depth), [request("stuck", Broken()), other])
    check(outputs, [other], limit=160)
    stuck = outputs["stuck"].outputs[0]
    assert (stuck.finish_reason, len(stuck.token_ids)) == ("error", 2)
    assert "stuck; got two tokens" in str(stuck.stop_reason)


def test_the_step_before_is_read_early_only_for_constrained_rows() -> None:
    for grammar, early in ((None, False), (Counting(9, 9), True)):
        runner = Noting(4, (4, 16))
        run_all(engine_of(depth=1, runner=runner), [request("one", grammar), request("two")])
        assert (("forward", "collect") in pairwise(runner.log)) is early


def test_structured_outputs_without_a_grammar_are_refused() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    with pytest.raises(RequestError, match="compiled grammar"):
        engine_of().submit(replace(request("one"), params=params))
