"""Asynchronous calls on a real model: whatever becomes of contexts, logits are those of one prefill of the final stream."""

import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jinfercept.calls import Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.parsers.cml import Delimiters
from jinfercept.chat.text_stream import TextStream
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.streaming import serve
from jinfercept.llm import LLM
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from jinfercept.start.start import EngineSetup
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.async_streams import (
    Returns,
    ReturnsAtTokens,
    ascii_tokenizer,
    async_request,
    expected_stream,
    make_markup,
)
from tests.support.fake_engine import POLICIES, ManualClock, run_all
from tests.support.tiny_model import TIE, reference_logits, tiny_setup

NAME = "llama_gqa"
AS_TEXT = Delimiters("<c>", "<h>", "<e>", "<t>", "<i>")
"""Delimiters that are no tokens of their own, where AsyncLM's are."""
SPELLINGS = {"special": AsyncCalls(), "text": AsyncCalls(delimiters=AS_TEXT)}
STREAMS = (
    "{c}1{h}f(1){e}ab{c}2{h}f(n=30){e} {t}{e}c",
    "{c}x{h}f(9){e}abcdefgh",
    "{c}1{h}f(0){e}{c}2{h}f(40){e}{t}{e}",
    "abcdefghijk{c}1{h}f(20){e}{t}{e}",
)
QUICK = ("discard", "swap", "copy_ahead")
"""Policies of every run."""
FREE = 4
"""Tokens that the model chooses behind each stream."""


@pytest.fixture(scope="module")
def setup() -> EngineSetup:
    """A pool that holds little more than the longest sequence."""
    tokenizer = ascii_tokenizer(True)
    return tiny_setup(NAME, kv_tokens=160, max_model_len=100, swap_space=0.001, tokenizer=tokenizer, lazy=False)


@pytest.fixture(scope="module")
def small(setup: EngineSetup) -> Iterator[LLM]:
    with LLM(setup) as llm:
        yield llm


def f(n: int) -> str:
    """Wait a few times as many milliseconds, in which the model gets to its trap."""
    time.sleep(n / 250)
    return "r" * (n % 9)


def scripted(stream: str, spelling: str) -> list[int]:
    marks = SPELLINGS[spelling].delimiters
    written = stream.format(c=marks.call, h=marks.head, e=marks.end, t=marks.trap)
    return ascii_tokenizer(True).encode(written, plain=spelling == "text")


def requests(llm: LLM, spelling: str, free: int = FREE) -> list[Request]:
    """A request for each stream."""
    scripts = [scripted(stream, spelling) for stream in STREAMS]
    params = [
        SamplingParams(temperature=0, max_tokens=len(s) + free, forced_output_ids=s, logprobs=0, ignore_eos=True)
        for s in scripts
    ]
    prompts = [{"prompt_token_ids": [3 + number, 5, 8]} for number in range(len(scripts))]
    return llm.make_requests(prompts, params, [Tool(f)], None, async_calls=SPELLINGS[spelling])


def check(output: RequestOutput, spelling: str, free: int = FREE) -> None:
    """Every generated token's log probability is that of the uncached model on the same stream; chosen ones are greedy."""
    completion, prompt = output.outputs[0], output.prompt_token_ids
    assert completion.finish_reason == "length", completion.stop_reason
    read = {i for interrupt in completion.interrupts for i in range(*interrupt.span)}
    generated = [i for i in range(len(completion.token_ids)) if i not in read]
    assert len(generated) == completion.num_generated
    rows = reference_logits(NAME, tuple(prompt + completion.token_ids))[len(prompt) - 1 :]
    reference = np.asarray(jax.nn.log_softmax(rows, axis=-1))
    tokenizer = ascii_tokenizer(True)
    forbidden = tokenizer.added_token_id("[INTR]")
    assert completion.logprobs is not None
    assert forbidden is not None
    for number, index in enumerate(generated):
        token, reported = completion.token_ids[index], completion.logprobs[index]
        assert reported is not None
        assert reported[token].logprob == pytest.approx(reference[index][token], abs=1e-4)
        if spelling == "special" and number >= len(generated) - free:
            best = np.delete(rows[index][: tokenizer.ids_below], forbidden).max()
            assert token != forbidden
            assert best - rows[index][token] < TIE


@pytest.mark.parametrize(
    "policy", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
def test_logits_are_those_of_one_prefill_under_every_policy(small: LLM, policy: str) -> None:
    counter, served, num_interceptions = CompileCounter(), list[tuple[str, RequestOutput]](), 0
    for depth in (0, 1):
        small.restart(policy=policy, pipeline_depth=depth)
        spelled = [(spelling, request) for spelling in SPELLINGS for request in requests(small, spelling)]
        outputs = serve(small.engine.thread, [request for _, request in spelled])
        served += [(spelling, output) for (spelling, _), output in zip(spelled, outputs, strict=True)]
        assert sum(len(output.outputs[0].interrupts) for output in outputs) >= 2 * 5  # what traps wait for
        counts = small.counters
        num_interceptions += counts.interceptions
        assert "preserve" in policy or counts.recomputed + counts.copied_out > 0, "the pool was never short"
    assert num_interceptions > 0
    assert counter.count == 0
    counter.close()
    for spelling, output in served:
        check(output, spelling)


SWEPT = "{c}1{h}f(1){e}b {c}2{h}g(){e}[{t}{e}d"


def sweep(setup: EngineSetup, policy: str, spelling: str, depth: int, arrival: int) -> int:
    """Two results that arrive at given tokens, in one step or one token apart, beside requests that need the memory.

    Returns the tokens that were evicted and had to come back.
    """
    length = 1 + 5 * arrival % (40 if spelling == "special" else 9)
    script, tokenizer = scripted(SWEPT, spelling), ascii_tokenizer(True)
    markup = make_markup(True, delimiters=SPELLINGS[spelling].delimiters)
    returns = {"1": Returns(arrival, "x" * length), "2": Returns(arrival + arrival % 2, "y")}
    serving, clock = setup.changed(policy=policy).serve(), ManualClock()
    serving.dispatcher.close()
    dispatcher = ReturnsAtTokens(clock, returns, trapped_polls=9)
    requests = RequestLifecycle(
        serving.engine.scheduler,
        dispatcher,
        clock,
        vocab_size=128,
        open_text=lambda request: TextStream(tokenizer, (), False, False),
    )
    dispatcher.engine = engine = Engine(requests, setup.runner, threading.Event(), depth=depth, check=True)
    others = [async_request(markup, tokenizer.encode("b" * 60), 0, name) for name in ("b", "c", "d")]
    outputs = run_all(engine, [async_request(markup, script, 0, logprobs=0), *others])
    setup.runner.reset()
    assert outputs["a"].outputs[0].token_ids == expected_stream(markup, tokenizer, script, 0, returns, depth)
    assert [interrupt.call.id for interrupt in outputs["a"].outputs[0].interrupts] == ["1", "2"]
    check(outputs["a"], spelling, free=0)
    return outputs["a"].metrics.recomputed_tokens + outputs["a"].metrics.copied_in_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_logits_behind_a_result_are_those_of_one_prefill_wherever_it_lands(
    setup: EngineSetup, small: LLM, spelling: str, depth: int
) -> None:
    steps = range(0, len(scripted(SWEPT, spelling)), 9)
    for arrival, policy in zip(steps, POLICIES, strict=False):
        sweep(setup, policy, spelling, depth, arrival)


def test_the_model_cannot_write_an_interrupt(small: LLM) -> None:
    small.restart()
    for spelling, options in SPELLINGS.items():
        marks = options.delimiters
        ids = ascii_tokenizer(True).encode(marks.interrupt, plain=spelling == "text")
        params = SamplingParams(
            temperature=0.0,
            max_tokens=40,
            ignore_eos=True,
            logit_bias=dict.fromkeys(ids, 100.0),
            frequency_penalty=0.5,
        )
        (output,) = small.generate([{"prompt_token_ids": [3, 5, 8]}], params, tools=[Tool(f)], async_calls=options)
        written = ascii_tokenizer(True).decode(output.outputs[0].token_ids, skip_special_tokens=False)
        assert marks.interrupt not in written
        assert spelling == "special" or written.count("<i") >= 2
        assert output.outputs[0].interrupts == ()


def test_penalties_count_what_is_read_and_not_what_was_void(small: LLM) -> None:
    """A mistake is answered at once. The sample in flight at depth 1, which is void, leaves nothing on the device."""
    texts = []
    for depth in (0, 1):
        small.restart(policy="preserve", pipeline_depth=depth)
        script = scripted("{c}1{h}g(0){e}", "special")
        params = SamplingParams(
            temperature=0,
            max_tokens=len(script) + 20,
            forced_output_ids=script,
            repetition_penalty=1.7,
            ignore_eos=True,
        )
        prompt = {"prompt_token_ids": [3, 5, 8]}
        (output,) = small.generate([prompt], params, tools=[Tool(f)], async_calls=AsyncCalls())
        (interrupt,) = output.outputs[0].interrupts
        assert interrupt.span[0] == len(script)
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_outputs_of_one_prompt_call_on_their_own_and_follow_ups_take_over_what_was_read(small: LLM) -> None:
    small.restart()
    script = scripted("{c}1{h}f(3){e}ab{t}{e}", "special")
    params = SamplingParams(
        temperature=1.0, seed=5, n=3, max_tokens=len(script) + 4, forced_output_ids=script, ignore_eos=True
    )
    prompt = {"prompt_token_ids": [3, 5, 8]}
    (output,) = small.generate([prompt], params, tools=[Tool(f)], async_calls=AsyncCalls())
    assert [[i.result.text for i in completion.interrupts] for completion in output.outputs] == [["rrr"]] * 3
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    again = {"prompt_token_ids": [3, 5, 8, *output.outputs[0].token_ids]}
    (later,) = small.generate([again], SamplingParams(temperature=0, max_tokens=2))
    assert later.num_cached_tokens >= len(again["prompt_token_ids"]) - 2 * 4


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_grammar_and_a_stop_string_hold_across_interrupts(small: LLM, spelling: str) -> None:
    """The grammar is of what the model writes; the interrupt between is no part of it."""
    small.restart()
    grammar = StructuredOutputsParams(choice=["ab yes.", "ab no."])
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=grammar, ignore_eos=True)
    (output,) = small.generate(["a"], params, tools=[Tool(f)], async_calls=SPELLINGS[spelling])
    assert output.outputs[0].text in ("ab yes.", "ab no.")
    script = scripted("a{c}1{h}g(0){e}b", spelling)
    params = SamplingParams(temperature=0, max_tokens=40, forced_output_ids=script, stop=["b"], ignore_eos=True)
    (output,) = small.generate(["a"], params, tools=[Tool(f)], async_calls=SPELLINGS[spelling])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")
    assert len(output.outputs[0].interrupts) == 1
