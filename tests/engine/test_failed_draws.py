"""A request whose logits are not finite ends in an error that says so, and no other request notices."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfercept.calls import Call
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import untied
from jinfercept.models.protocol import Params
from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import NOT_FINITE
from jinfercept.sched.speculation import NO_DRAFTS, SpeculationLimits
from tests.support.engine_requests import request, serve
from tests.support.fake_engine import POLICIES, copying_token, run_all
from tests.support.fake_runner import FakeRunner
from tests.support.tiny_model import TOOL, streams, tiny_setup

BUCKETS = (4, 8, 16)
POISON = 77
"""After this token no number is finite."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SHARED = list(range(1, 18))


def poisoned(context: list[int], words: Sequence[int] | None = None) -> int:
    return NOT_FINITE if POISON in context else copying_token(context, words)


@pytest.mark.parametrize("speculation", [NO_DRAFTS, SpeculationLimits(4, 1, 3), SpeculationLimits(4, 1, 3, 0.1)])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["copy_ahead", "discard", "min_waste"])
def test_a_failed_draw_ends_its_request_in_any_state_and_no_other(
    policy: str, depth: int, speculation: SpeculationLimits
) -> None:
    """Prompts, or results of calls, with a token after which nothing can be drawn; all share the first pages."""
    calls: list[dict[int, list[int]]] = [{}, {3: [5, POISON, 6]}, {2: [4, 4]}, {1: [9], 4: [POISON]}]
    requests = [
        request(
            f"{number} {place}",
            [1, 2, 3, 4, 1, 2, 3, 4, number, *([POISON, 2] if number == 3 else []), 3],
            params=replace(GREEDY, max_tokens=12),
            calls=script,
        )
        for number in range(4)
        for place, script in enumerate(calls)
    ]

    def run(num_pages: int, speculation: SpeculationLimits) -> dict[str, CompletionOutput]:
        runner = FakeRunner(4, BUCKETS, write=poisoned)
        sizes = {"num_pages": num_pages, "buckets": BUCKETS, "link_tokens_per_s": 800.0}
        engine = serve(POLICIES[policy](), runner=runner, depth=depth, speculation=speculation, **sizes)
        outputs = run_all(engine, requests, max_steps=3000)
        kv = engine.scheduler.kv
        for failed in (each for each in requests if outputs[each.id].outputs[0].finish_reason == "error"):
            tokens = [*failed.prompt_token_ids, *outputs[failed.id].outputs[0].token_ids]
            index = tokens.index(POISON) // 4
            context = kv.open()
            kv.refresh(context, [*tokens, 0])
            assert context.num_pages <= index
            kv.close(context)
        return {name: output.outputs[0] for name, output in outputs.items()}

    expected, outputs = run(200, NO_DRAFTS), run(14, speculation)
    for name, output in outputs.items():
        number, place = map(int, name.split())
        assert output.finish_reason == ("error" if number == 3 or place in (1, 3) else "length")
        assert (output.token_ids, output.stop_reason) == (expected[name].token_ids, expected[name].stop_reason)
        assert output.finish_reason != "error" or "logits are NaN" in f"{output.stop_reason}"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One token's embedding is not finite."""
    setup = tiny_setup(kv_tokens=512)
    with LLM(setup) as llm:
        embed, layers, head = untied(llm.model.config, separate(setup.runner.params))  # pyright: ignore[reportArgumentType]
        embedding = np.array(embed["embedding"])
        embedding[POISON] = np.nan
        llm.update_weights(Params(embed | {"embedding": embedding}, layers, head))
        yield llm


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_beside_one_whose_logits_are_nan_write_what_they_write_alone(
    llm: LLM, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They share its first pages, in which its NaN spread: a chunk weighs what a query may not see with 0; 0 · NaN is NaN."""
    ways: tuple[dict[str, Any], ...] = (
        *({}, {"top_p": 0.9, "temperature": 1.0}, {"logprobs": 2}, {"prompt_logprobs": 1}),
        *({"allowed_token_ids": [3, 4, 5]}, {"n": 2, "temperature": 0.7}, {"repetition_penalty": 1.2}),
    )
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": 3} | way) for way in ways
    ]
    broken = [{"prompt_token_ids": [*SHARED, number, POISON, 3]} for number in range(len(ways))]
    good = [{"prompt_token_ids": [*SHARED, number, 30]} for number in range(len(ways))]
    calls = [ScriptedDetector({2: [Call("scripted", f"{POISON} 5")]})]
    llm.restart(pipeline_depth=depth)
    expected = [streams(llm.generate(*alone)) for alone in zip(good, params, strict=True)]
    before = expected[0][0]
    llm.restart(pipeline_depth=depth)
    with caplog.at_level(logging.WARNING):
        mixed = llm.generate(
            [*broken, *good, good[0]],
            [*params, *params, params[0]],
            tools=[TOOL],
            detector=[None] * 2 * len(ways) + calls,
        )
    failed, fine, paused = mixed[: len(ways)], mixed[len(ways) : -1], mixed[-1]
    assert [streams([output]) for output in fine] == expected
    for output in (*failed, paused):
        check_failed(output)
    assert streams([paused])[0] == [*before[:2], POISON, 5]
    failures = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(failures) == len(ways) + 2  # one of them has two outputs
    assert {message.split(" fails: ")[1] for message in failures} == {paused.outputs[0].stop_reason}
    again = llm.generate(good, params)
    assert [streams([output]) for output in again] == expected


def check_failed(output: RequestOutput) -> None:
    for completion in output.outputs:
        assert completion.finish_reason == "error"
        assert f"{completion.stop_reason}".startswith(
            "FloatingPointError: the model's logits are NaN or infinite; fix: "
        )
        assert completion.interceptions or not completion.token_ids
