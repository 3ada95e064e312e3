"""Rollouts as a trainer meets them, on the embedded model."""

import asyncio
import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfercept import LLM, AsyncCalls, RequestError, Rollout, Rollouts, SamplingParams, Tool


def check_sample(llm: LLM, sample: Rollout) -> None:
    """Its log probabilities are those of one prefill of its tokens; its masks, versions and calls agree with each other."""
    assert sample.origin is not None
    adapter = sample.origin.request.adapter
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [output] = llm.generate([sample.token_ids], params, lora=adapter and adapter.name)
    scores = output.prompt_logprobs
    assert scores is not None
    generated = np.flatnonzero(sample.loss_mask)
    expected = [scores[place][int(sample.token_ids[place])].logprob for place in generated]  # pyright: ignore
    assert np.allclose(sample.logprobs[generated], expected, atol=2e-4)
    others = sample.loss_mask == 0
    assert others[: sample.num_prompt].all()
    assert (sample.weight_versions[others] == -1).all()
    assert (sample.weight_versions[generated] >= 0).all()
    assert not sample.logprobs[others].any()
    for call in sample.calls:
        assert not sample.loss_mask[slice(*call.span)].any()


PROMPTS = ["Count: 1 2 (3) 4", "The capital of France is"]
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)


def look_up(text: str) -> str:
    return " [none]"


CALLS = Tool(look_up, start="(", stop=")")


def test_a_group_shares_its_prompt_and_draws_apart(smollm2: LLM) -> None:
    rollouts = smollm2.rollout(PROMPTS, DRAWN, n=3, tools=[CALLS])
    assert rollouts.prompts.tolist() == [0, 0, 0, 1, 1, 1]
    assert rollouts.num_generated == 6 * 6
    assert len({tuple(sample.token_ids.tolist()) for sample in rollouts}) == 6
    for sample in rollouts:
        check_sample(smollm2, sample)
    assert [len(group) for group in rollouts.groups] == [3, 3]
    plain = smollm2.generate(PROMPTS, replace(DRAWN, n=3), tools=[CALLS])
    written = [completion.token_ids for output in plain for completion in output.outputs]
    assert [sample.token_ids[sample.num_prompt :].tolist() for sample in rollouts] == written


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"min_p": 0.1, "top_k": 5, "temperature": 0.6}])
def test_kept_tokens_are_those_that_could_be_drawn(smollm2: LLM, cut: dict[str, Any]) -> None:
    params = SamplingParams(
        **{"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True, "logprobs": 20} | cut
    )
    [sample] = smollm2.rollout(PROMPTS[:1], params)
    [output] = smollm2.generate(PROMPTS[:1], params)
    best = [named for named in output.outputs[0].logprobs or [] if named is not None]
    for place in range(sample.num_prompt, len(sample)):
        kept = sample.kept_tokens[place]
        assert kept is not None
        assert sample.token_ids[place] in kept
        named = best[place - sample.num_prompt]
        if len(kept) > 20:
            continue
        logits = np.array([named[token].logprob for token in kept.tolist()]) / params.temperature
        drawn = named[int(sample.token_ids[place])].logprob / params.temperature
        assert sample.processed_logprobs[place] == pytest.approx(drawn - np.log(np.exp(logits).sum()), abs=1e-4)


def test_greedy_tokens_and_uncut_ones_say_so(smollm2: LLM) -> None:
    [greedy] = smollm2.rollout(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=4))
    assert greedy.processed_logprobs.tolist() == [0.0] * len(greedy)
    assert greedy.logprobs[greedy.num_prompt :].all()
    [warm] = smollm2.rollout(PROMPTS[:1], SamplingParams(temperature=1.0, seed=1, max_tokens=4))
    assert np.allclose(warm.processed_logprobs, warm.logprobs, atol=1e-5)
    assert not warm.kept_tokens


def test_what_is_kept_is_said_where_ends_or_calls_are_all_that_cuts(smollm2: LLM) -> None:
    vocabulary = set(range(smollm2.model.config.vocab_size))
    ending = SamplingParams(temperature=1.0, seed=1, max_tokens=3, min_tokens=2)
    [sample] = smollm2.rollout(PROMPTS[1:], ending)
    ends = vocabulary.difference(pickle.loads(pickle.dumps(sample)).kept_tokens[sample.num_prompt].tolist())
    assert ends == {*smollm2.tokenizer.eos_token_ids}  # pyright: ignore[reportOptionalMemberAccess]
    assert [kept is None for kept in sample.kept_tokens[sample.num_prompt :]] == [False, False, True]
    chat = [{"role": "user", "content": "Hello."}]
    [called] = smollm2.rollout([chat], replace(ending, min_tokens=0), tools=[add], tool_choice="required")
    assert all(called.token_ids[place] in called.kept_tokens[place] for place in range(called.num_prompt, len(called)))


def test_an_aborted_group_goes_on_as_if_nothing_had_been(smollm2: LLM) -> None:
    gate, calls = threading.Event(), threading.Semaphore(0)

    def wait(text: str) -> str:
        calls.release()
        gate.wait()
        return " [late]"

    calling = smollm2.get_tokenizer().encode(" say (a) now")
    params = [replace(DRAWN, forced_output_ids=calling), replace(DRAWN, max_tokens=4)]
    tools = [Tool(wait, start="(", stop=")")]
    prompts = ["Listen:", PROMPTS[1]]
    with smollm2.rollout_stream(prompts, params, n=2, tools=tools) as stream:
        for _ in range(2):
            assert calls.acquire(timeout=60)
        stream.abort_group(0)
        partial = stream.result()
    gate.set()
    assert [sample.is_partial for sample in partial] == [True, True, False, False]
    assert [sample.calls[-1].status for sample in partial[:2]] == ["pending"] * 2
    resumed, whole = smollm2.rollout(partial), smollm2.rollout(prompts, params, n=2, tools=tools)
    assert not resumed.is_partial
    for sample, other in zip(resumed, whole, strict=True):
        assert sample.token_ids.tolist() == other.token_ids.tolist()
        assert sample.loss_mask.tolist() == other.loss_mask.tolist()
        assert np.allclose(sample.logprobs, other.logprobs, atol=1e-4)
        assert [call[:4] for call in sample.calls] == [call[:4] for call in other.calls]
    assert resumed[2] is partial[2]


@pytest.mark.parametrize("calls", ["async", pytest.param("parallel", marks=pytest.mark.slow)])
def test_asynchronous_calls_that_were_not_read_are_made_again(smollm2: LLM, calls: Any) -> None:
    gate, started, items = threading.Event(), threading.Semaphore(0), list[str]()

    def price(item: str) -> str:
        items.append(item)
        if item == "chair":
            started.release()
            gate.wait(60)
        return "23"

    text = (
        '[CALL] 1 [HEAD] price(item="{}") [END] and [TRAP][END] then [CALL] 2 [HEAD] price(item="{}") [END] [TRAP][END]'
    )
    script = smollm2.get_tokenizer().encode(text.format("lamp", "chair"))
    params = replace(DRAWN, forced_output_ids=script, max_tokens=len(script) + 4)
    with smollm2.rollout_stream(
        ["Prices:"], params, tools=[Tool(price)], async_calls=AsyncCalls(calls=calls)
    ) as stream:
        assert started.acquire(timeout=60)
        stream.abort()
        partial = stream.result()
    gate.set()
    assert [call[:4] for call in partial[0].calls if call.status == "pending"] == [
        ("price", '{"item": "chair"}', None, "pending")
    ]
    [sample] = smollm2.rollout(partial)
    generated = sample.token_ids[sample.loss_mask == 1].tolist()
    assert generated[: len(script)] == script
    assert len(generated) == len(script) + 4
    lines = [("price", f'{{"item": "{item}"}}', "23", "ok") for item in ("lamp", "chair")]
    assert [call[:4] for call in sample.calls] == lines
    assert items == ["lamp", "chair", "chair"]
    check_sample(smollm2, sample)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_a_chat_of_three_turns_is_never_tokenised_again(smollm2: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=12)
    rollouts = smollm2.rollout([{"role": "user", "content": "What is 2+3? Use add."}], params, tools=[add])
    for question in ("And 4+4?", "Thanks <|im_end|> bye"):
        before = rollouts
        rollouts = smollm2.rollout(before, params, tools=[add], following=[{"role": "user", "content": question}])
        for sample, first in zip(rollouts, before, strict=True):
            assert sample.token_ids[: len(first)].tolist() == first.token_ids.tolist()
            assert sample.loss_mask[: len(first)].tolist() == first.loss_mask.tolist()
            assert (sample.num_prompt, sample.index) == (first.num_prompt, first.index)
            check_sample(smollm2, sample)
            assert sample.conversation[len(first.conversation)]["content"] == question
            assert sample.calls[: len(first.calls)] == first.calls


def test_a_chat_that_has_to_call_has_to_after_an_abort_too(smollm2: LLM) -> None:
    chat = [{"role": "user", "content": "Hello."}]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=40)
    options: Any = {"tools": [add], "tool_choice": "required"}
    [whole] = smollm2.rollout([chat], params, **options)
    with smollm2.rollout_stream([chat], params, **options) as stream:
        stream.abort()
        partial = stream.result()
    [resumed] = smollm2.rollout(partial)
    assert resumed.token_ids.tolist() == whole.token_ids.tolist()
    assert np.allclose(resumed.processed_logprobs, whole.processed_logprobs, atol=1e-4)
    assert [call[:4] for call in resumed.calls] == [call[:4] for call in whole.calls]


def test_texts_and_ids_follow_samples_of_prompts(smollm2: LLM) -> None:
    first = smollm2.rollout(PROMPTS, DRAWN)
    following: Any = [" Then", np.array([260, 261])]
    second = smollm2.rollout(pickle.loads(pickle.dumps(first)), DRAWN, following=following)
    for sample, before, count in zip(second, first, (1, 2), strict=True):
        assert sample.token_ids[: len(before)].tolist() == before.token_ids.tolist()
        put = sample.loss_mask[len(before) :]
        assert put.tolist() == [0] * count + [1] * 6
        check_sample(smollm2, sample)


def test_groups_come_when_they_end_and_arrays_are_filled_up(smollm2: LLM) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True) for count in (12, 2)]
    groups = list[Rollouts]()
    rollouts = smollm2.rollout(PROMPTS, params, n=2, on_group=groups.append, pad_id=9)
    assert [group.prompts.tolist() for group in groups] == [[1, 1], [0, 0]]
    with pytest.raises(RequestError, match="whole numbers above 0; got 0"):
        rollouts.padded(multiple=0)
    arrays = rollouts.padded(multiple=64)
    assert {name: array.shape for name, array in arrays.items()} == dict.fromkeys(arrays, (4, 64))
    for row, length in enumerate(rollouts.lengths):
        assert (arrays["token_ids"][row, length:] == 9).all()
        assert (arrays["loss_mask"][row, length:] == 0).all()
    for length, problem in ((3, "longer"), ("3", "whole numbers above 0; got '3'")):
        with pytest.raises(RequestError, match=problem):
            rollouts.padded(length=length)  # pyright: ignore[reportArgumentType]

    async def both() -> list[Rollouts]:
        made = [group async for group in smollm2.arollout_stream(PROMPTS, DRAWN, n=2)]
        return [*made, await smollm2.arollout(PROMPTS, DRAWN, n=2)]

    *apart, together = asyncio.run(both())
    assert sorted(group.prompts.tolist() for group in apart) == [[0, 0], [1, 1]]
    assert together.token_ids.tolist() == smollm2.rollout(PROMPTS, DRAWN, n=2).token_ids.tolist()


def test_what_cannot_be_meant_is_refused(smollm2: LLM) -> None:
    done, question = smollm2.rollout(PROMPTS[:1], DRAWN), [{"role": "user", "content": "a"}]
    chat = smollm2.rollout([question], DRAWN)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (PROMPTS, {"following": "x"}, "following is allowed only with samples"),
        (PROMPTS, {"max_rounds": 3}, "need messages"),
        (PROMPTS, {"params": SamplingParams(n=2, temperature=1), "n": 2}, "n is given twice"),
        (PROMPTS, {"n": True}, "n is a whole number; got True; fix: say how many"),
        (PROMPTS, {"n": 1.0}, "n is a whole number; got 1.0"),
        (done, {"n": 2}, "goes on with the tools"),
        (done, {"n": 2, "following": "x"}, "continued samples need n=1"),
        (done, {"following": ["x", "y"]}, "following must have one entry for each of 1 samples.*got 2 of them"),
        (done, {"following": {"role": "user", "content": "a"}}, "fix: a text, a list of token ids or"),
        (done, {"following": [None]}, "following must be a text or token ids; got None"),
        (done, {"params": DRAWN}, "no sample is partial; got Rollouts.*0 partial, 0 failed. with params"),
        (chat, {"following": [{"role": "usr", "content": "b"}]}, "one of system, .*, tool; got 'usr' .*'user'"),
        (chat, {"following": [{"role": "user"}]}, "role user has content"),
        (chat, {"following": [[]]}, "must be messages; got \\[\\]"),
        ([{"role": "usr", "content": "a"}], {}, "one of system, .*; got 'usr'"),
        (question, {"detector": 3}, "a chat takes no detector"),
        (PROMPTS, {"params": {"temperature": 1}}, "sampling_params are SamplingParams; got {'temperature': 1}"),
        (PROMPTS, {"sampling_params": DRAWN}, "no such option; got sampling_params; fix: one of .* params"),
        (PROMPTS, {"pad_id": 1.5}, "pad_id is a token id; got 1.5"),
        (PROMPTS, {"on_group": 3}, "on_group must be a function; got 3"),
        (PROMPTS, {"lora": 3}, "no such adapter; got 3"),
    ]
    for prompts, options, problem in wrong:
        with pytest.raises(RequestError, match=problem):
            smollm2.rollout(prompts, **options)
    assert smollm2.rollout(done)[0] is done[0] is done[np.int64(0)]
    with pytest.raises(RequestError, match="Rollouts must hold Rollout; got 3"):
        Rollouts([3])  # pyright: ignore[reportArgumentType]
    with smollm2.rollout_stream(PROMPTS[:1], DRAWN) as stream:
        wrong_groups: list[Any] = [4, False, [0]]
        for group in wrong_groups:
            with pytest.raises(RequestError, match="no such group"):
                stream.abort_group(group)


def test_tools_that_raise_hang_and_return_too_much_leave_whole_samples(smollm2: LLM) -> None:
    ends = threading.Event()

    def bad(text: str) -> str:
        if "1" in text:
            raise ValueError("no")
        return "x" * 50_000_000

    def hang(text: str) -> str:
        ends.wait()
        return text

    tools = [
        Tool(bad, start="(", stop=")", max_result_tokens=8),
        Tool(hang, start="[", stop="]", timeout_s=0.05),
    ]
    forced = [smollm2.get_tokenizer().encode(text) for text in ("(1)", "[2]", "(3)")]
    params = [SamplingParams(temperature=0, max_tokens=8, forced_output_ids=ids) for ids in forced]
    rollouts = smollm2.rollout(["a", "a", "a"], params, tools=tools)
    ends.set()
    assert [sample.calls[0].status for sample in rollouts] == ["error", "timeout", "too_large"]
    for sample in rollouts:
        check_sample(smollm2, sample)
