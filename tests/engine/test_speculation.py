"""Drafts change no token and lose no page, whatever becomes of the requests."""

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.chat.text_stream import TextStream
from jinfercept.events import Finished, Token
from jinfercept.kv.side_pool import NO_SIDES, SideSizes
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.speculation import NO_DRAFTS, SpeculationLimits
from tests.engine.test_constrained_engine import EOS, Count, Counting
from tests.support.engine_requests import DEPTHS, only, request, serve
from tests.support.fake_engine import POLICIES, VOCAB, AffineCost, FakeRunner, ManualClock, copying_token, run_all
from tests.support.fake_runner import FakeForward
from tests.support.sample_tokenizers import byte_level

BUCKETS = (4, 8, 16)
DRAFTS = SpeculationLimits(4, 1, 3)
BY_MODEL = DRAFTS._replace(pass_share=0.1)
BY_LAYER = BY_MODEL._replace(by_layer=True)


def run(
    requests: list[Request], speculation: SpeculationLimits, policy: str = "copy_ahead", **options: Any
) -> tuple[dict[str, RequestOutput], FakeRunner, Any]:
    """Outputs, the runner with its plans, and the scheduler's counters."""
    write = options.pop("write", copying_token)
    has_states = options.get("states", NO_SIDES).num_slots > 0
    runner = FakeRunner(4, BUCKETS, write=write, draft=options.pop("draft", None), has_states=has_states)
    engine = serve(
        POLICIES[policy](), runner=runner, buckets=BUCKETS, speculation=speculation, link_tokens_per_s=800.0, **options
    )
    return run_all(engine, requests, max_steps=2000), runner, engine.scheduler.counters


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=12),
        st.integers(1, 24),
        st.dictionaries(st.integers(1, 16), st.lists(st.integers(0, 5), max_size=6), max_size=3),
        st.one_of(st.none(), st.integers(0, VOCAB - 1)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(
    described=REQUESTS,
    policy=st.sampled_from(sorted(POLICIES)),
    depth=st.sampled_from([0, 1]),
    limits=st.builds(
        lambda most, short, more, share, layer: SpeculationLimits(
            most, short, short + more, share, by_layer=layer and share is not None
        ),
        st.integers(1, 7),
        st.integers(1, 3),
        st.integers(0, 2),
        st.sampled_from([None, 0.0, 0.2]),
        st.booleans(),
    ),
    pages=st.tuples(st.integers(14, 24), st.integers(0, 8)),
    latency_s=st.sampled_from([0.0, 0.3]),
    states=st.sampled_from([NO_SIDES, SideSizes(4, 0, 3), SideSizes(7, 8, 3)]),
)
def test_drafts_change_no_token_and_no_end(
    described: list[tuple[list[int], int, dict[int, list[int]], int | None]],
    policy: str,
    depth: int,
    limits: SpeculationLimits,
    pages: tuple[int, int],
    latency_s: float,
    states: SideSizes,
) -> None:
    requests = [
        request(
            str(number),
            prompt,
            calls=calls,
            params=SamplingParams(temperature=0, max_tokens=most, stop_token_ids=None if stop is None else [stop]),
        )
        for number, (prompt, most, calls, stop) in enumerate(described)
    ]
    ends = []
    for speculation in (NO_DRAFTS, limits):
        outputs, _, _ = run(
            requests,
            speculation,
            policy,
            depth=depth,
            num_pages=pages[0],
            num_host_pages=pages[1],
            states=states,
            latency=lambda call: latency_s,
        )
        ends.append(
            {
                name: (
                    output.token_ids,
                    output.finish_reason,
                    output.num_generated,
                    [pause.span for pause in output.interceptions],
                )
                for name, done in outputs.items()
                for output in done.outputs
            }
        )
    assert ends[0] == ends[1]


@DEPTHS
def test_a_token_whose_page_is_being_fetched_gets_no_drafts(depth: int) -> None:
    """The page is written behind the compute: it would be written over the drafts."""
    requests = [
        request(
            str(number), [number, 1, 2], calls={9 + number: []}, params=SamplingParams(temperature=0, max_tokens=24)
        )
        for number in range(4)
    ]
    pools = {"num_pages": 14, "num_host_pages": 8, "depth": depth, "latency": lambda call: 0.3}
    expected, _, _ = run(requests, NO_DRAFTS, "lru_host", **pools)
    outputs, runner, _ = run(requests, DRAFTS, "lru_host", **pools)
    assert {name: only({name: output}).token_ids for name, output in outputs.items()} == {
        name: only({name: output}).token_ids for name, output in expected.items()
    }
    landing = [
        chunk
        for plan in runner.plans
        for chunk in plan.chunks
        if {copy.device_slot for copy in plan.fetch}
        & set(chunk.new_pages.slots[chunk.start // 4 :] if chunk.new_pages else ())
    ]
    assert landing
    assert not any(chunk.num_drafts for chunk in landing)


@DEPTHS
@pytest.mark.parametrize("limits", [DRAFTS, BY_MODEL, BY_LAYER])
def test_drafts_save_steps_and_are_counted(depth: int, limits: SpeculationLimits) -> None:
    requests = [request("a", [1, 2], 60)]
    slow, without, _ = run(requests, NO_DRAFTS, depth=depth, num_pages=20)
    fast, runner, counters = run(requests, limits, depth=depth, num_pages=20)
    assert only(fast).token_ids == only(slow).token_ids
    assert len(runner.plans) < 0.8 * len(without.plans)
    chunks = [chunk for plan in runner.plans for chunk in plan.chunks if chunk.num_drafts]
    assert counters.drafts == len(chunks)
    assert counters.drafted == sum(chunk.num_drafts for chunk in chunks)
    assert sum(counters.accepted.values()) == len(without.plans) - len(runner.plans)
    assert list(counters.accepted) == sorted(counters.accepted)


@DEPTHS
def test_a_layer_whose_drafts_are_refused_rests_until_another_request_begins(depth: int) -> None:
    requests = [request("a", [1, 2], 120), request("b", [3, 4], 40)]
    outputs, runner, counters = run(
        requests, BY_LAYER, depth=depth, num_pages=40, max_num_seqs=1,
        draft=lambda context, _: (copying_token(context, None) + 2) % VOCAB,
    )  # fmt: skip
    assert counters.drafts == 0, "drafts that were never right are compared, not verified"
    assert 0 < sum(plan.draft is not None and plan.draft.drafts for plan in runner.plans) < 12
    first_of_b = next(
        index for index, plan in enumerate(runner.plans) if index and plan.chunks and plan.chunks[0].start == 0
    )
    reads = [plan.draft is not None for plan in runner.plans]
    assert reads[0]
    assert sum(reads[:first_of_b]) < 40
    assert not any(reads[60:first_of_b])
    assert reads[first_of_b]
    assert not any(reads[first_of_b + 35 :])
    expected, _, _ = run(requests, NO_DRAFTS, depth=depth, num_pages=40, max_num_seqs=1)
    assert {name: output.outputs for name, output in outputs.items()} == {
        name: output.outputs for name, output in expected.items()
    }


class TimedRunner(FakeRunner):
    """Moves the engine's clock by the seconds of every step: those of the profile, and more with drafts."""

    clock: ManualClock
    drafts_factor, share, seconds = 1.0, 0.05, 0.0

    def forward(self, plan: StepPlan) -> FakeForward:
        passes = 0 if plan.draft is None else 3 if plan.draft.drafts else 1
        factor = self.drafts_factor if any(chunk.num_drafts for chunk in plan.chunks) else 1.0
        step_s = AffineCost().step_s(plan.bucket, 0) * (1 + passes * self.share) * factor
        self.seconds, self.clock.time = self.seconds + step_s, self.clock.time + step_s
        return super().forward(plan)


@pytest.mark.parametrize(
    ("batch", "states"),
    [
        (1, NO_SIDES),
        *(
            pytest.param(batch, states, marks=pytest.mark.slow)
            for batch in (1, 4, 12)
            for states in (NO_SIDES, SideSizes(40, 8, 3))
        ),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
def test_a_layer_that_drafts_costs_two_percent_at_most(batch: int, states: SideSizes, factor: float) -> None:
    """At three shares of right drafts, where steps with drafts take as long as the profile says, and longer."""

    def seconds(limits: SpeculationLimits, accuracy: float) -> float:
        def draft(context: Any, _: Any) -> int:
            is_right = random.Random(1000 * len(context) + context[-1]).random() < accuracy
            return (copying_token(context, None) + 2 * (not is_right)) % VOCAB

        runner = TimedRunner(4, BUCKETS, write=copying_token, draft=draft, has_states=states is not NO_SIDES)
        pool = {"num_pages": 900, "max_num_seqs": batch, "max_model_len": 300, "states": states, "depth": 0}
        engine = serve(POLICIES["copy_ahead"](), runner=runner, buckets=BUCKETS, speculation=limits, **pool)
        assert isinstance(engine.requests.clock, ManualClock)
        runner.clock, runner.drafts_factor = engine.requests.clock, factor
        requests = [request(str(number), [1 + number % 7, 2, number % 5], 200) for number in range(3 * batch)]
        outputs = run_all(engine, requests, max_steps=2000)
        assert all(output.num_generated == 200 for done in outputs.values() for output in done.outputs)
        return runner.seconds

    limits = SpeculationLimits(3, 1, 3, TimedRunner.share, by_layer=True)
    ratios = [seconds(limits, accuracy) / seconds(NO_DRAFTS, 0.0) for accuracy in (0.0, 0.5, 1.0)]
    assert max(ratios) <= 1.02 if batch == 1 else 1.03  # rows with more drafts end before the others and leave gaps
    assert ratios[-1] < 0.85 or batch == 12 or factor > 1.0


def open_text(requests: Request) -> TextStream:
    """The text of a request whose tokens are characters."""
    params = requests.params
    return TextStream(
        byte_level(), tuple(params.stop or ()), params.include_stop_str_in_output, skip_special_tokens=False
    )


@DEPTHS
def test_a_stop_string_in_accepted_drafts_ends_the_text_where_it_does_without(depth: int) -> None:
    def request_with(number: int, stop: list[str]) -> Request:
        params = SamplingParams(temperature=0, max_tokens=60, stop=stop, include_stop_str_in_output=number % 2 == 1)
        return request(str(number), [1, 2], params=params, calls={9: [1, 2, 0], 20: [2]})

    def end_of(submitted: Request, speculation: SpeculationLimits) -> tuple[Any, ...]:
        """Text, tokens and reason of a request, and whether its last token was a draft behind another one."""
        runner = FakeRunner(4, BUCKETS, write=copying_token)
        options: dict[str, Any] = {"open_text": open_text, "num_pages": 24, "depth": depth, "link_tokens_per_s": 800.0}
        engine = serve(POLICIES["copy_ahead"](), runner=runner, buckets=BUCKETS, speculation=speculation, **options)
        engine.submit(submitted)
        while True:
            events = engine.step()
            for event in events:
                if isinstance(event, Finished):
                    done = event.output.outputs[0]
                    drawn = sum(isinstance(event, Token) for event in events)
                    drafts = [draft for chunk in runner.plans[-1].chunks for draft in chunk.drafts]
                    drafted = 1 < drawn <= len(drafts) and drafts[drawn - 1] == done.token_ids[-1]
                    return done.text, done.token_ids, done.finish_reason, done.stop_reason, drafted

    whole = end_of(request_with(0, []), NO_DRAFTS)[0]
    stopped = within = 0
    for at in range(len(whole) - 4):  # a stop string that ends in the result of a call is not found
        stopping = request_with(at, ["~~~~", whole[at : at + 5]])
        fast, slow = end_of(stopping, DRAFTS), end_of(stopping, NO_DRAFTS)
        assert fast[:4] == slow[:4]
        stopped += fast[2:4] == ("stop", whole[at : at + 5])
        within += fast[4] and fast[2] == "stop"
    assert stopped > 30
    assert within, "no stop string ended in an accepted draft"


class CopiedCount(Count):
    def copy(self) -> "CopiedCount":
        return copy(self)


@dataclass(frozen=True)
class CopiedCounting(Counting):
    """The same grammar with a constraint that can be copied."""

    def constrain(self, end_token_ids: frozenset[int]) -> CopiedCount:
        return CopiedCount(self, end_token_ids)


def counted(context: list[int], words: Sequence[int] | None = None) -> int:
    """A draft model that has learnt the grammar: its tokens are counted on from the last one."""
    del words
    allowed = [v for v in range(VOCAB) if v not in EOS and v % 7 == (context[-1] + 1) % 7]
    mask = [sum(1 << v % 32 for v in allowed if v // 32 == word) for word in range(VOCAB // 32 + 1)]
    return copying_token(context, mask)


@DEPTHS
@pytest.mark.parametrize("limits", [DRAFTS, BY_MODEL])
@pytest.mark.parametrize(("least", "most", "late"), [(38, 40, False), (40, 40, True), (45, 60, True)])
def test_each_draft_is_masked_by_the_grammar_after_those_before_it(
    depth: int, least: int, most: int, late: bool, limits: SpeculationLimits
) -> None:
    requests = [
        request(name, prompt, 50, {5: [1, 2], 17: [3]}, grammar=CopiedCounting(least, most, late))
        for name, prompt in (("a", [1, 2]), ("b", [0, 1, 2] * 3))
    ]
    fast, _, counters = run(requests, limits, depth=depth, num_pages=40, eos_token_ids=EOS, draft=counted)
    slow, *_ = run(requests, NO_DRAFTS, depth=depth, num_pages=40, eos_token_ids=EOS)
    assert counters.accepted
    for name, output in slow.items():
        drafted, other = fast[name].outputs[0], output.outputs[0]
        assert (drafted.token_ids, drafted.finish_reason) == (other.token_ids, other.finish_reason)


@DEPTHS
@pytest.mark.parametrize("grammar", [Counting(3, 12), Counting(12, 12, late=True)])
def test_a_grammar_without_copies_has_no_drafts(depth: int, grammar: Counting) -> None:
    requests = [request("a", [1, 2], 20, grammar=grammar)]
    outputs, _, counters = run(requests, DRAFTS, depth=depth, num_pages=20, eos_token_ids=EOS)
    assert counters.drafted == 0
    assert only(outputs).token_ids == only(run(requests, NO_DRAFTS, num_pages=20, eos_token_ids=EOS)[0]).token_ids


def test_requests_whose_draws_depend_on_their_own_tokens_have_no_drafts() -> None:
    for params in (
        SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=3),
        SamplingParams(temperature=0, max_tokens=30, forced_output_ids=[1, 2] * 15),
    ):
        _, _, counters = run([request("a", [1, 2] * 4, params=params)], DRAFTS, num_pages=20)
        assert counters.drafted == 0
