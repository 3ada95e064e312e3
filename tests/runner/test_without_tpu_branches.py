"""What TPUs have of their own leaves the programs of one device, of a CPU or an NVIDIA GPU, as they are, letter by letter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest

from benchmarks.suite.models import SMALL_GEMMA2, SMALL_LLAMA
from jinfercept.models import experts, joined_weights, model
from jinfercept.models.config import ExpertsConfig, ModelConfig
from jinfercept.models.load import random_params
from jinfercept.models.model import Model
from jinfercept.pallas import reference
from jinfercept.pallas.layouts import pages
from jinfercept.runner import layer_attention, page_transfers
from jinfercept.runner.executables import Executables
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape

SHAPE = RunnerShape(num_pages=6, page_size=4, max_num_seqs=2, max_model_len=8, buckets=(4,), layers_per_step=1)
WITH_EXPERTS = replace(SMALL_LLAMA, num_layers=1, experts=ExpertsConfig(4, 2, 32, normalised=True))
KINDS = {"embed", "layers", "head", "gather", "scatter", "sample", "shape", "remember", "logprobs", "enter"}


def programs(config: ModelConfig, attention: str, platform: str) -> dict[str, str]:
    """The text of all that a runner compiles, as it is lowered for a platform, by its key."""
    texts: dict[str, str] = {}

    def lower(_: Executables, key: Any, function: Callable[..., Any], *arguments: Any, donate: Any = ()) -> None:
        name = key if isinstance(key, str) else " ".join(map(str, key))
        traced = jax.jit(function, donate_argnums=tuple(donate)).trace(*arguments)
        texts[name] = traced.lower(lowering_platforms=(platform,)).as_text()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executables, "add", lower)
        ModelRunner(Model(config), random_params(config, "float32", 0), SHAPE, attention=attention).close()
    return texts


@pytest.mark.parametrize(
    ("config", "attention", "platform"),
    [
        pytest.param(WITH_EXPERTS, "auto", "cpu", id="experts"),
        pytest.param(WITH_EXPERTS, "reference", "cpu", id="experts, reference", marks=pytest.mark.slow),
        pytest.param(SMALL_GEMMA2, "reference", "cpu", id="windows", marks=pytest.mark.slow),
        pytest.param(WITH_EXPERTS, "reference", "cuda", id="experts of a GPU", marks=pytest.mark.slow),
        pytest.param(SMALL_GEMMA2, "reference", "cuda", id="windows of a GPU", marks=pytest.mark.slow),
    ],
)
def test_programs_of_one_device_are_those_without_branches_of_tpus(
    config: ModelConfig, attention: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branched = programs(config, attention, platform)
    assert {name.split()[0] for name in branched} >= KINDS
    for module in (pages, reference, page_transfers):
        monkeypatch.setattr(module, "is_interleaved", lambda _: False)
    monkeypatch.setattr(layer_attention, "with_padded_heads", lambda q, *_: q)
    monkeypatch.setattr(experts, "tpu_grouped_product", lambda *_: None)
    for module in (model, joined_weights):
        monkeypatch.setattr(module, "parts_experts", lambda: False)
    assert programs(config, attention, platform) == branched
