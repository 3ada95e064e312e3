"""The adapter to Tunix keeps its rollout protocol: with a stand-in for the protocol, since Tunix is not installed here."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jinfercept.models.config import ModelConfig
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from tests.support.tiny_model import GOLDEN


class BaseRollout:
    """Of Tunix, without its abstract methods."""


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the adapter."""
    stand_in: Any = ModuleType("tunix.rl.rollout.base_rollout")
    stand_in.BaseRollout, stand_in.RolloutOutput = BaseRollout, SimpleNamespace
    for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, "examples.tunix_rollout", raising=False)
    return import_module("examples.tunix_rollout")


class Llama3(NamedTuple):
    """A model of Tunix's."""

    config: Any


class Numbers:
    """A tokenizer of texts that are token ids."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1


def state_of(adapter: Any, config: ModelConfig, scale: float = 1.0) -> dict[str, Any]:
    """The golden Llama's weights under Tunix's names, nested."""
    params = separate(load(GOLDEN / "llama_gqa", dtype="float32").params)

    def nested(layer: Any) -> dict[str, Any]:
        made = dict[str, Any]()
        for name, theirs in adapter.LAYER_NAMES.items():
            *groups, last = theirs.split(".")
            place = made
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = layer[name] * scale
        return made

    layers = {index: nested(layer) for index, layer in enumerate(params.layers)}
    norm, unembed = params.head["norm"], params.head["unembed"].T
    embedding = params.embed["embedding"]
    return {
        "embedder": {"input_embedding": embedding},
        "layers": layers,
        "final_norm": {"w": norm},
        "lm_head": {"w": unembed},
    }


@pytest.mark.slow
def test_samples_have_the_logprobs_of_tunix_s_own_models() -> None:
    pytest.importorskip("tunix", reason="google-tunix is not installed beside this package")
    assert import_module("examples.tunix_rollout").main(["check"]) == 0


@pytest.mark.slow
def test_samples_have_the_logprobs_of_the_weights_that_the_trainer_gave(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(GOLDEN / "llama_gqa", dtype="float32").model.config
    theirs = SimpleNamespace(
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_dim=config.ffn_size,
        norm_eps=config.norm_eps,
        rope_theta=config.rope.theta,
        weight_tying=config.tie_embeddings,
    )
    monkeypatch.setattr(adapter, "_state", lambda module: state_of(adapter, config))
    settings = SimpleNamespace(
        max_prompt_length=6,
        max_tokens_to_generate=5,
        temperature=1.0,
        top_p=None,
        top_k=-1,
        seed=jax.numpy.array(3),
        eos_tokens=None,
    )
    worker = adapter.JinferceptRollout(
        rollout_actor=Llama3(theirs),
        tokenizer=Numbers(),
        rollout_config=settings,
        kv_tokens=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        page_size=4,
        dtype="float32",
        profile="paper-gptj-6b-a100",
    )
    with worker.llm:
        output = worker.generate(["5 6 7", "5 6 7", "8 9"], settings)
        assert output.left_padded_prompt_tokens.tolist() == [[0, 0, 0, 5, 6, 7]] * 2 + [[0, 0, 0, 0, 8, 9]]
        assert worker.completion_mask(5).sum() == sum(map(len, output.tokens))
        completions = np.zeros((3, 5), np.int32)
        for row, tokens in zip(completions, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        logps = worker.get_per_token_logps(output.left_padded_prompt_tokens, completions)
        for row, given in zip(np.asarray(logps), output.logprobs, strict=True):
            np.testing.assert_allclose(row[: len(given)], given, atol=2e-4)
        worker.update_params(state_of(adapter, config, 0.5))
        assert not np.allclose(worker.get_per_token_logps(output.left_padded_prompt_tokens, completions), logps)
        with pytest.raises(ValueError, match="max_prompt_length"):
            worker.generate(["5 " * 7], settings)
