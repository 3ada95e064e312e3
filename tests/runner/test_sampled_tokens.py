"""Every option of a request, through the whole engine: the draws are its own, whatever becomes of its context."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfercept.calls import Call
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.streaming import serve
from jinfercept.llm import LLM
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.sampling_reference import probabilities, shaped
from tests.support.tiny_model import TIE, TOOL, Workload, reference_logits, streams, tiny_llm

NAME, ENDS = "llama_gqa", (2, 5)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"temperature": 0.0, "bad_words_token_ids": [[53], [114, 92], [92, 42], [125, 37, 1]]},
    {"temperature": 0.0, "min_tokens": 9, "logit_bias": {2: 4.0, 5: 4.0}, "ignore_eos": False},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {7: 2.5, 53: -3.0}, "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": [3, 11, 37, 53, 92, 127], "frequency_penalty": 0.5},
    {"temperature": 0.9},
    {
        "temperature": 1.1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": {9: 1.0},
        "bad_words_token_ids": [[37], [53, 92]],
    },
)


def workload() -> Workload:
    """Requests with scripted calls, each with one of the options and a seed of its own."""
    work = Workload(number=22, seed=11)
    for number, params in enumerate(work.params):
        options = {"ignore_eos": True, "seed": number, "max_tokens": max(10, params.max_tokens)}
        work.params[number] = SamplingParams(**options | OPTIONS[number % len(OPTIONS)])
    return work


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    """A pool in which everything fits."""
    with tiny_llm(kv_tokens=4096, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(roomy: LLM) -> list[RequestOutput]:
    """The uninterrupted run: nothing is ever lost."""
    roomy.restart(policy="preserve", pipeline_depth=0)
    return workload().run(roomy)


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """A pool that holds little more than the longest sequence: eviction and preemption happen all the time."""
    with tiny_llm(kv_tokens=112, max_model_len=100, swap_space=0.001, lazy=False) as llm:
        yield llm


def check_draws(output: RequestOutput, params: SamplingParams) -> None:
    """Assert that every generated token is one that the options allow: the very one, if the request is greedy."""
    completion, prompt = output.outputs[0], output.prompt_token_ids
    returned = {i for pause in completion.interceptions for i in range(*pause.span)}
    logits = reference_logits(NAME, (*prompt, *completion.token_ids))
    given, generated, recent = list(prompt), [], []
    for index, token in enumerate(completion.token_ids):
        if index in returned:
            given.append(token)
            recent = []
            continue
        ends = () if params.ignore_eos else ENDS
        row = shaped(logits[len(prompt) + index - 1], params, given, generated, recent=recent, ends=ends)
        if params.temperature == 0:
            assert row.max() - row[token] < TIE, f"token {index} of {output.request_id} is not the greedy one"
        else:
            assert probabilities(row, params)[token] > 0, f"token {index} of {output.request_id} was filtered out"
        generated.append(token)
        recent.append(token)


def test_the_uninterrupted_run_obeys_every_option(reference: list[RequestOutput]) -> None:
    for output, params in zip(reference, workload().params, strict=True):
        check_draws(output, params)
        assert output.outputs[0].num_generated > params.min_tokens or output.outputs[0].finish_reason == "length"
    assert sum(len(output.interceptions) for output in reference) > 10


@pytest.mark.parametrize(
    ("policy", "chunk", "depth"),
    [("copy_ahead", 3, 0), ("discard", 1, 1), pytest.param("lru", None, 1, marks=pytest.mark.slow)],
)
def test_draws_are_the_same_under_every_policy_with_interceptions(
    small: LLM, reference: list[RequestOutput], policy: str, chunk: int | None, depth: int
) -> None:
    small.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=chunk)
    outputs = workload().run(small, delay_s=0.003)
    assert streams(outputs) == streams(reference)
    assert small.counters.recomputed + small.counters.copied_out > 0
    for ours, theirs in zip(outputs, reference, strict=True):
        check_logprobs(ours)
        assert (ours.outputs[0].logprobs is None) == (theirs.outputs[0].logprobs is None)


def test_draws_are_the_same_under_another_order_of_waiting_requests(small: LLM, reference: list[RequestOutput]) -> None:
    small.restart(policy="copy_ahead", order="fcfs", max_chunk_tokens=3)
    outputs = workload().run(small, delay_s=0.003)
    assert streams(outputs) == streams(reference)
    small.restart(order="missing_work", max_chunk_tokens=None)


def check_logprobs(output: RequestOutput) -> None:
    """Assert that what is reported is the softmax of the uncached model's logits; nothing for what tools returned."""
    completion, prompt = output.outputs[0], output.prompt_token_ids
    if completion.logprobs is None:
        assert completion.cumulative_logprob is None
        return
    assert len(completion.logprobs) == len(completion.token_ids)
    drawn = [
        report[token].logprob for token, report in zip(completion.token_ids, completion.logprobs, strict=True) if report
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(drawn))
    returned = {i for pause in completion.interceptions for i in range(*pause.span)}
    logits = reference_logits(NAME, (*prompt, *completion.token_ids))
    for index, (token, report) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert (report is None) == (index in returned)
        if report is not None:
            check_report(report, token, logits[len(prompt) + index - 1])


def check_report(report: dict, token: int, logits: np.ndarray) -> None:
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-logits)
    assert token in report
    for reported, (logprob, rank, text) in report.items():
        assert logprob == pytest.approx(expected[reported], abs=1e-4)
        assert order[rank - 1] == reported or abs(logits[order[rank - 1]] - logits[reported]) < TIE
        assert text is None


@pytest.mark.parametrize("chunk", [1, 5, None])
def test_a_prompt_is_scored_whole_whatever_is_cached_and_however_it_is_chunked(small: LLM, chunk: int | None) -> None:
    rng = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": rng.integers(0, 128, length).tolist()} for length in (1, 2, 30, 61)]
    params = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=2, ignore_eos=True)
    small.restart(policy="discard", pipeline_depth=1, max_chunk_tokens=chunk)
    small.generate(prompts, replace(params, prompt_logprobs=None))  # their pages are cached now
    outputs = small.generate(prompts * 2, params)
    for output in outputs:
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        logits = reference_logits(NAME, tuple(output.prompt_token_ids))
        for index, (token, report) in enumerate(zip(output.prompt_token_ids[1:], others, strict=True)):
            assert report is not None
            assert 2 <= len(report) <= 3
            check_report(report, token, logits[index])


def test_forks_draw_as_requests_of_their_own_and_pause_on_their_own(small: LLM) -> None:
    prompt = {"prompt_token_ids": [7, 1, 9, 4, 4, 100, 3, 77, 50, 51, 52]}
    detector = ScriptedDetector({3: [Call("scripted", "8 9 10")], 6: [Call("scripted", "11")]})
    params = SamplingParams(n=4, seed=20, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    small.restart(policy="copy_ahead", max_chunk_tokens=None)
    [output] = small.generate(prompt, params, tools=[TOOL], detector=detector)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 11
    for index, completion in enumerate(output.outputs):
        small.restart()
        [request] = small.make_requests(prompt, replace(params, n=1), [TOOL], detector)
        [alone] = serve(small.engine.thread, [replace(request, index=index)])
        assert completion.token_ids == alone.outputs[0].token_ids
        assert [pause.span for pause in completion.interceptions] == [(3, 6), (9, 10)]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    unseeded = small.generate(prompt, SamplingParams(n=3, max_tokens=9, ignore_eos=True))[0]
    assert len({tuple(completion.token_ids) for completion in unseeded.outputs}) == 3


def test_nothing_compiles_whatever_is_asked_for(small: LLM) -> None:
    counter = CompileCounter()
    for depth in (0, 1):
        small.restart(policy="copy_ahead", pipeline_depth=depth)
        workload().run(small)
        prompt = {"prompt_token_ids": list(range(1, 60))}
        small.generate(prompt, SamplingParams(n=2, logprobs=20, prompt_logprobs=20, top_k=3, min_tokens=2))
    assert counter.count == 0
    counter.close()


def test_bad_words_are_texts_and_reported_tokens_have_texts(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    [free] = smollm2.generate("The capital of France is", params)
    assert "Paris" in free.outputs[0].text
    assert free.outputs[0].logprobs is not None
    for token, report in zip(free.outputs[0].token_ids, free.outputs[0].logprobs, strict=True):
        assert smollm2.tokenizer is not None
        assert report is not None
        assert report[token].rank == 1
        assert report[token].decoded_token == smollm2.tokenizer.token_text(token)
    [other] = smollm2.generate("The capital of France is", replace(params, bad_words=["Paris", "the city of"]))
    assert "Paris" not in other.outputs[0].text
    assert "the city of" not in other.outputs[0].text
