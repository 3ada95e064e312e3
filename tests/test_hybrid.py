"""Models with recurrent layers: whatever is decided about contexts, the tokens are those of the model without a cache.

That model has the logits of transformers (`tests/models/test_model.py`).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.models.load import read_config
from jinfercept.models.model import kv_bytes_per_token
from jinfercept.sampling_params import SamplingParams
from tests.support.fake_engine import sampled_depths
from tests.support.tiny_model import GOLDEN, TOOL, Workload, all_return_at_once, count_ties, tiny_llm

NAME = "qwen3_next"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CHUNKS = {"discard": 1, "improved_discard": 5, "swap": 7, "copy_ahead": 3}


@pytest.fixture(scope="module", params=[NAME, pytest.param("nemotron_h", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest) -> str:
    """A model with recurrent layers of each kind."""
    return request.param


@pytest.fixture(scope="module")
def small(name: str) -> Iterator[LLM]:
    """A pool of little more than the longest sequence, and a state for every sequence that may run: all of both is wanted."""
    with tiny_llm(name, kv_tokens=112, max_model_len=100, num_states=8) as llm:
        yield llm


@pytest.mark.parametrize(("policy", "depth"), sampled_depths())
def test_every_policy_gives_the_greedy_tokens(small: LLM, name: str, policy: str, depth: int) -> None:
    small.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=CHUNKS.get(policy))
    outputs = Workload(number=10, seed=7).run(small, delay_s=0.002)
    assert sum(count_ties(name, output) for output in outputs) <= 1
    assert small.counters.interceptions > 0
    assert policy not in ("swap", "copy_ahead") or small.counters.copied_in > 0
    moved = small.counters.recomputed + small.counters.copied_out
    assert policy in ("preserve", "heuristic_preserve") or moved > 0, "the pool was never short"


def test_a_paused_context_is_kept_with_its_state_as_long_as_there_is_room(small: LLM, name: str) -> None:
    """One request after the other, for each of which the pool is large enough."""
    small.restart(policy="preserve", pipeline_depth=0, max_chunk_tokens=None)
    work = Workload(number=10, seed=7)
    each = zip(work.prompts, work.params, work.detectors, strict=True)
    outputs = [small.generate(prompt, params, tools=[TOOL], detector=detector)[0] for prompt, params, detector in each]
    assert sum(count_ties(name, output) for output in outputs) <= 1
    assert small.counters.interceptions > 0
    assert small.counters.recomputed == 0
    assert small.counters.kept == small.counters.returned > 0


@pytest.mark.parametrize("policy", ["copy_ahead", pytest.param("min_waste", marks=pytest.mark.slow)])
def test_everybody_returns_at_once(small: LLM, name: str, policy: str) -> None:
    small.restart(policy=policy, pipeline_depth=1)
    assert sum(count_ties(name, output) for output in all_return_at_once(small, prompt=20)) <= 1


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def drafting(name: str) -> Iterator[LLM]:
    """The same, with a draft of what followed the last token before."""
    sizes = {"kv_tokens": 112, "max_model_len": 100, "num_states": 8, "profile": "roofline-llama-13b-a100"}
    with tiny_llm(name, speculative_config=DRAFTS, **sizes) as llm:
        yield llm


@pytest.mark.parametrize("policy", ["copy_ahead", "discard", pytest.param("swap", marks=pytest.mark.slow)])
def test_drafts_that_are_refused_leave_no_trace_in_a_state(drafting: LLM, name: str, policy: str) -> None:
    drafting.restart(policy=policy, pipeline_depth=1, max_chunk_tokens=CHUNKS.get(policy))
    outputs = Workload(number=10, seed=7).run(drafting, delay_s=0.002)
    assert sum(count_ties(name, output) for output in outputs) <= 1
    accepted = drafting.counters.accepted.total()
    assert 0 < accepted < drafting.counters.drafted
    assert drafting.counters.interceptions > 0


def test_the_next_turn_of_a_conversation_goes_on_behind_the_last_full_page_of_the_answer(small: LLM, name: str) -> None:
    small.restart(policy="copy_ahead", pipeline_depth=1, max_chunk_tokens=None)
    prompt = list(range(3, 45))
    for cached in (0, 48, 60):
        [output] = small.generate([{"prompt_token_ids": prompt}], GREEDY)
        assert output.num_cached_tokens == cached
        assert count_ties(name, output) == 0
        prompt = [*prompt, *output.outputs[0].token_ids, 7, 8, 9, 10]
    outputs = small.generate([{"prompt_token_ids": list(range(3, 45))}] * 3, GREEDY)
    assert sum(count_ties(name, output) for output in outputs) == 0


def test_the_memory_of_a_context_is_that_of_its_pages_and_one_state(small: LLM, name: str) -> None:
    """The formula of docs/hybrid.md against the arrays."""
    config, setup, plan = read_config(GOLDEN / name), small.engine.setup, small.memory_plan
    sizes, num_layers = config.delta_net, config.num_layers - config.num_kv_layers
    assert sizes is not None
    tokens = (sizes.num_taps - 1) * (2 * sizes.num_key_heads * sizes.key_dim + sizes.num_value_heads * sizes.value_dim)
    state_bytes = num_layers * (4 * tokens + 4 * sizes.num_value_heads * sizes.key_dim * sizes.value_dim)
    token_bytes = config.num_kv_layers * 2 * config.num_kv_heads * config.head_dim * 4
    states = setup.runner.second
    assert states is not None
    arrays = [array for of_layer in states.layers for array in of_layer]
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
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 32}},
            "recurrent layers .* 32 draft tokens; fix: num_speculative_tokens of 31 at most",
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
    assert "recurrent layers │ 3 of 4" in text
    assert "100 GiB of --swap-space hold" in text
    assert "states 6.4 KiB per sequence" in text
