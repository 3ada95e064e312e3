"""Drafts of a smaller real model: the same tokens under every policy, the same distribution, and nothing compiles for them."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ConfigError, ModelError
from jinfercept.llm import LLM
from jinfercept.models.model import kv_bytes_per_token
from jinfercept.start.backend import CompileCounter
from tests.support.tiny_model import GOLDEN, count_ties, streams, tiny_llm
from tests.test_speculation import NAME, check_distribution, workload

pytestmark = pytest.mark.usefixtures("every_step_takes_a_second")

POOL = {"kv_tokens": 160, "max_model_len": 120, "swap_space": 0.001}
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
MACHINE = "roofline-llama-13b-a100"
NUM_TOKENS = 120
"""Vocabulary of the draft model: it knows fewer tokens than the served one."""


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A draft model that often agrees: the served one with noise, without its last layer and its last tokens."""
    folder = tmp_path_factory.mktemp("drafts") / "small"
    shutil.copytree(GOLDEN / NAME, folder)
    config = json.loads((folder / "config.json").read_text())
    kept = config["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": kept, "vocab_size": NUM_TOKENS}))
    rng, tensors = np.random.default_rng(0), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if f"layers.{kept}." in name:
            continue
        noisy = tensor.astype(np.float32) * (1 + 0.05 * rng.standard_normal(tensor.shape))
        tensors[name] = (noisy[:NUM_TOKENS] if len(noisy) == config["vocab_size"] else noisy).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(drafts: dict[str, Any]) -> Iterator[LLM]:
    """A pool that holds little more than the longest sequence."""
    with tiny_llm(NAME, speculative_config=drafts, profile=MACHINE, lazy=False, **POOL, **SIZES) as llm:
        yield llm


def test_every_policy_gives_the_tokens_of_a_run_without_drafts(llm: LLM, drafts: dict[str, Any]) -> None:
    work = workload()
    llm.restart(policy="preserve", pipeline_depth=0, speculative_config=None)
    expected = work.run(llm)
    assert not llm.counters.drafted
    counter = CompileCounter()
    accepted = refused = 0
    for number, policy in enumerate(("discard", "lru_host", "copy_ahead")):
        llm.restart(
            policy=policy,
            pipeline_depth=number % 2,
            max_chunk_tokens=(None, 7, 3)[number % 3],
            speculative_config=drafts,
        )
        outputs = work.run(llm, delay_s=0.001)
        given = llm.counters.accepted.total()
        accepted, refused = accepted + given, refused + llm.counters.drafted - given
        for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
            assert streams([ours]) == streams([theirs]) or (index % 4 != 1 and count_ties(NAME, ours)), policy
    assert accepted > 50
    assert refused > 50
    assert counter.count == 0
    counter.close()


@pytest.mark.slow
def test_drawn_tokens_have_the_distribution_of_the_model(llm: LLM, drafts: dict[str, Any]) -> None:
    llm.restart(policy="copy_ahead", pipeline_depth=0, speculative_config=drafts, seed=5)
    check_distribution(llm, 400)


def test_drafts_of_the_same_model_are_accepted_at_any_temperature_and_it_is_priced(llm: LLM) -> None:
    drafts = {"model": str(GOLDEN / NAME), "num_speculative_tokens": 3}
    work = workload()
    work.params = [
        replace(sampling, temperature=number % 3 / 2, seed=number, top_p=1.0)
        for number, sampling in enumerate(work.params)
    ]
    with tiny_llm(NAME, speculative_config=drafts, profile=None, **POOL, **SIZES) as twice:
        setup, memory = twice.engine.setup, twice.engine.setup.memory_plan
        config: Any = setup.model.config
        token_bytes, params = kv_bytes_per_token(config, "float32"), setup.runner.params
        assert setup.profile.kv_bytes_per_token == memory.token_bytes(4) == 2 * token_bytes
        assert memory.weight_bytes == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        assert 0 < setup.profile.draft_share <= 1
        outputs = work.run(twice)
        given, drafted = twice.counters.accepted.total(), twice.counters.drafted
        twice.update_weights(params)
        assert streams(work.run(twice)) == streams(outputs)
    assert given >= 0.8 * drafted  # a call ends a step too; a busy machine may measure that drafts cost too much
    llm.restart(speculative_config=None)
    assert streams(work.run(llm)) == streams(outputs)


def test_a_draft_model_that_cannot_be_is_an_error(llm: LLM, drafts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="restart cannot load another draft model"):
        llm.restart(speculative_config=drafts | {"model": str(GOLDEN / NAME)})
    llm.restart(speculative_config={"num_speculative_tokens": 2})  # n-grams need no other executables
    with pytest.raises(ModelError, match="nothing"):
        tiny_llm(NAME, speculative_config=drafts | {"model": str(tmp_path / "nothing")}, **POOL, **SIZES)
