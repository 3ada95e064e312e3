"""Models with windowed layers in a pool of their own: whatever is decided about contexts, the tokens are the model's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.streaming import serve
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.models.load import read_config
from jinfercept.request import FollowUp
from jinfercept.sampling_params import SamplingParams
from tests.support.engine_state import engine_of
from tests.support.fake_engine import sampled_depths
from tests.support.kv_contexts import side_pool
from tests.support.tiny_model import GOLDEN, Workload, all_return_at_once, count_ties, tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def windowed(name: str = "gemma3", **flags: Any) -> LLM:
    sizes = {"kv_tokens": 112, "max_model_len": 100, "max_num_batched_tokens": 16, "num_window_tokens": 120}
    return tiny_llm(name, **{**sizes, **flags})


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """Pools of little more than the longest sequence, and of a few windows."""
    with windowed() as llm:
        yield llm


@pytest.mark.parametrize(("policy", "depth"), sampled_depths())
def test_every_policy_gives_the_greedy_tokens(small: LLM, policy: str, depth: int) -> None:
    small.restart(policy=policy, pipeline_depth=depth)
    outputs = Workload(number=10, seed=7).run(small, delay_s=0.002)
    assert sum(count_ties("gemma3", output) for output in outputs) <= 1
    assert small.counters.interceptions > 0


@pytest.mark.parametrize("policy", ["copy_ahead", pytest.param("min_waste", marks=pytest.mark.slow)])
def test_everybody_returns_at_once(small: LLM, policy: str) -> None:
    small.restart(policy=policy, pipeline_depth=1)
    assert sum(count_ties("gemma3", output) for output in all_return_at_once(small, prompt=60)) <= 1


def test_drafts_samples_of_one_prompt_and_follow_ups_are_right() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with windowed(speculative_config=drafts, kv_tokens=300, num_window_tokens=240) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 10 + [number // 2]} for number in range(8)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        assert sum(count_ties("gemma3", output) for output in outputs) <= 1
        assert llm.counters.drafted > 0
        [request] = llm.make_requests(prompts[0], GREEDY, [], None)
        [output] = serve(llm.engine.thread, [replace(request, follow_up=FollowUp())])
        prompt = [*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 8]
        [after] = llm.make_requests({"prompt_token_ids": prompt}, GREEDY, [], None)
        computed = llm.counters.computed
        [again] = serve(llm.engine.thread, [replace(after, follows=request.id)])
        assert count_ties("gemma3", again) == 0
        assert llm.counters.computed - computed < 16, "the follow-up computed its context again"


def test_a_paused_context_keeps_the_pages_that_the_formula_says(small: LLM) -> None:
    """The formula of docs/hybrid.md against what is counted, for a context of four windows."""
    config, num_tokens, seen = read_config(GOLDEN / "gemma3"), 80, list[tuple[int, int]]()
    small.restart(policy="preserve", pipeline_depth=0)
    kv, runner, plan = engine_of(small).scheduler.kv, small.engine.setup.runner, small.memory_plan
    before = side_pool(kv).num_free

    def look(argument: str) -> list[int]:
        side_pool(kv).forget_checkpoints()  # what is kept for others
        seen.append((kv.occupancy().paused, before - side_pool(kv).num_free))
        return []

    prompt, detector = {"prompt_token_ids": [*range(num_tokens)]}, ScriptedDetector({1: [Call("look", "")]})
    [output] = small.generate(prompt, GREEDY, tools=[Tool(look, name="look")], detector=detector)
    assert count_ties("gemma3", output) == 0
    occupancy = side_pool(kv).occupancy()
    assert (occupancy.used, occupancy.paused, sum(occupancy)) == (0, 0, plan.windows.num_slots)
    assert runner.second is not None
    assert sum(array.nbytes for array in runner.second.layers) == plan.window_bytes
    assert sum(array.nbytes for array in runner.kv.layers) == plan.kv_bytes
    windowed_layers, windows = sum(kind.window is not None for kind in config.kinds), plan.windows
    assert windows.slot_cost == 4 * windowed_layers / (config.num_layers - windowed_layers)
    first = (num_tokens - windows.window + 1 - windows.slack) // 4
    assert seen == [(num_tokens // 4, num_tokens // 4 - first)]


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("llama_gqa", {}, "no layers have a window"),
        ("mistral_windowed", {"max_model_len": 100}, "all layers have a window"),
        ("gemma3", {"num_window_tokens": 8}, "two windows; got num_window_tokens=8; fix: at least"),
        ("gemma3", {"num_window_tokens": 10**13}, "does not fit; got num_window_tokens=10000000000000 of"),
        (
            "gemma3",
            {"kv_tokens": 16, "max_model_len": None, "max_num_seqs": 2},
            "no layers have a window that is shorter",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused(name: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        windowed(name, **flags)
