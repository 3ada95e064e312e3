"""Models with recurrent layers: whatever is decided about contexts, the tokens are those of the model without a cache.

That model has the logits of transformers (`tests/models/test_model.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.engine.streaming import serve
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.models.load import read_config
from jinfercept.models.model import kv_bytes_per_token
from jinfercept.request import FollowUp
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.fake_engine import POLICIES
from tests.support.matrices import sampled_depths
from tests.support.sample_tokenizers import byte_level
from tests.support.tiny_model import GOLDEN, TOOL, Workload, all_return_at_once, count_ties, tiny_llm

NAME = "qwen3_next"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CHUNKS = {"discard": 1, "improved_discard": 5, "swap": 7, "copy_ahead": 3}


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """A pool of little more than the longest sequence, and a state for every sequence that may run: all of both is wanted."""
    with tiny_llm(NAME, kv_tokens=112, max_model_len=100, num_states=8) as llm:
        yield llm


@pytest.mark.parametrize(("policy", "depth"), sampled_depths())
def test_every_policy_gives_the_greedy_tokens(small: LLM, policy: str, depth: int) -> None:
    small.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=CHUNKS.get(policy))
    outputs = Workload(number=10, seed=7).run(small, delay_s=0.002)
    assert sum(count_ties(NAME, output) for output in outputs) <= 1
    assert small.counters.interceptions > 0
    assert policy not in ("swap", "copy_ahead") or small.counters.copied_in > 0
    moved = small.counters.recomputed + small.counters.copied_out
    assert policy in ("preserve", "heuristic_preserve") or moved > 0, "the pool was never short"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk", [1, 3, 16, None])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_full_matrix_of_policies_depths_and_chunks(
    small: LLM, policy: str, depth: int, chunk: int | None, seed: int
) -> None:
    small.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=chunk)
    for output in Workload(number=12, seed=seed).run(small, delay_s=0.001):
        count_ties(NAME, output)


def test_a_paused_context_is_kept_with_its_state_as_long_as_there_is_room(small: LLM) -> None:
    """One request after the other, for each of which the pool is large enough."""
    small.restart(policy="preserve", pipeline_depth=0, max_chunk_tokens=None)
    work = Workload(number=10, seed=7)
    each = zip(work.prompts, work.params, work.detectors, strict=True)
    outputs = [small.generate(prompt, params, tools=[TOOL], detector=detector)[0] for prompt, params, detector in each]
    assert sum(count_ties(NAME, output) for output in outputs) <= 1
    assert small.counters.interceptions > 0
    assert small.counters.recomputed == 0
    assert small.counters.kept == small.counters.returned > 0


@pytest.mark.parametrize("policy", ["copy_ahead", pytest.param("min_waste", marks=pytest.mark.slow)])
def test_everybody_returns_at_once(small: LLM, policy: str) -> None:
    small.restart(policy=policy, pipeline_depth=1)
    assert sum(count_ties(NAME, output) for output in all_return_at_once(small, prompt=20)) <= 1


def test_the_next_turn_of_a_conversation_goes_on_behind_the_prompt_before(small: LLM) -> None:
    small.restart(policy="copy_ahead", pipeline_depth=1, max_chunk_tokens=None)
    prompt = list(range(3, 45))
    for cached in (0, 32, 48):
        [output] = small.generate([{"prompt_token_ids": prompt}], GREEDY)
        assert output.num_cached_tokens == cached
        assert count_ties(NAME, output) == 0
        prompt = [*prompt, *output.outputs[0].token_ids, 7, 8, 9, 10]
    outputs = small.generate([{"prompt_token_ids": list(range(3, 45))}] * 3, GREEDY)
    assert sum(count_ties(NAME, output) for output in outputs) == 0


@pytest.mark.slow
def test_drawn_and_constrained_tokens_and_follow_ups_do_not_depend_on_what_is_lost() -> None:
    flags: dict[str, Any] = {"load_format": "dummy", "tokenizer": byte_level(), "dtype": "float32", "page_size": 4}
    flags |= {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 100, "profile": "paper-gptj-6b-a100"}
    config = replace(read_config(GOLDEN / NAME), vocab_size=257, eos_token_ids=(), max_position=256)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[abc]{9,12}")),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=6, max_tokens=40, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0.5, seed=7, max_tokens=40, ignore_eos=True, n=2),
    ]

    def served(kv_tokens: int, policy: str) -> list[list[int]]:
        sizes = flags | {"kv_tokens": kv_tokens, "policy": policy, "check_pages": True, "lazy": True}
        with LLM(config, **sizes) as llm:
            requests = llm.make_requests(["the same"] * 4, params, [], None)
            kept = replace(requests[2], follow_up=FollowUp())
            outputs = serve(llm.engine.thread, [*requests[:2], kept, requests[3]])
            again = [*outputs[2].prompt_token_ids, *outputs[2].outputs[0].token_ids, 7, 8]
            [after] = llm.make_requests({"prompt_token_ids": again}, GREEDY, [], None)
            outputs += serve(llm.engine.thread, [replace(after, follows=kept.id)])
            assert kv_tokens > 200 or llm.counters.preemptions > 0
            return [completion.token_ids for output in outputs for completion in output.outputs]

    assert served(112, "copy_ahead") == served(1024, "discard")


def test_the_memory_of_a_context_is_that_of_its_pages_and_one_state(small: LLM) -> None:
    """The formula of docs/hybrid.md against the arrays."""
    config, setup, plan = read_config(GOLDEN / NAME), small.engine.setup, small.memory_plan
    sizes, num_layers = config.delta_net, config.num_layers - config.num_kv_layers
    assert sizes is not None
    tokens = (sizes.num_taps - 1) * (2 * sizes.num_key_heads * sizes.key_dim + sizes.num_value_heads * sizes.value_dim)
    state_bytes = num_layers * (4 * tokens + 4 * sizes.num_value_heads * sizes.key_dim * sizes.value_dim)
    token_bytes = config.num_kv_layers * 2 * config.num_kv_heads * config.head_dim * 4
    states = setup.runner.layer_states
    assert states is not None
    arrays = [array for of_layer in states.arrays for array in of_layer]
    num_slots, num_tokens = 8 + 1, 112 + setup.shape.page_size  # with those that are no sequence's
    assert sum(array.nbytes for array in arrays) == plan.states.num_bytes == num_slots * state_bytes
    assert sum(array.nbytes for array in setup.runner.kv.layers) == plan.kv_bytes == num_tokens * token_bytes
    assert kv_bytes_per_token(config, "float32") == token_bytes
    assert plan.state_size(setup.shape.page_size) == -(-state_bytes // token_bytes)
    assert "8 states of recurrent layers" in str(plan)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "recurrent layers .* speculative_config",
        ),
        ({"num_states": 3}, "every running sequence has a state; got num_states=3; fix: at least max_num_seqs=8"),
    ],
)
def test_what_needs_parts_of_contexts_is_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_llm(NAME, **flags)


def test_a_model_without_recurrent_layers_has_no_states() -> None:
    with pytest.raises(ConfigError, match="the model has no recurrent layers; got num_states=9"):
        tiny_llm("llama_gqa", num_states=9)


def test_info_says_what_a_sequence_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info", str(GOLDEN / NAME)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 of 4; no drafts or disk tier" in text
    assert "100 GiB of --swap-space hold" in text
    assert "states 6.4 KiB per sequence" in text
