"""Adapters whose matrices are a trainer's arrays: tokens are those of the same adapter in files."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jinfercept.errors import ConfigError, ModelError
from jinfercept.llm import LLM
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.peft_adapters import ALL, ATTENTION, shapes_of, write_adapter
from tests.support.tiny_model import GOLDEN, tiny_llm

SCALE = 2.0
"""`lora_alpha / rank` of `write_adapter`."""


def written(llm: LLM, lora: str | None) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return llm.generate({"prompt_token_ids": list(range(12))}, params, lora=lora)[0].outputs[0].token_ids


def ours(tensors: dict[str, np.ndarray], head_dim: int) -> dict[str, Any]:
    """The matrices of attention by our names, in our shapes, as a trainer has them."""
    named = dict[str, Any]()
    for name, matrix in tensors.items():
        *_, layer, _, module, side, _ = name.split(".")
        weight, heads = module[0], (-1, head_dim)
        matrix = jnp.asarray(matrix.T)  # A: [inputs, rank], B: [rank, outputs]
        if side == "lora_B" and weight != "o":
            matrix = matrix.reshape(len(matrix), *heads)
        elif side == "lora_A" and weight == "o":
            matrix = matrix.reshape(*heads, matrix.shape[-1])
        named[f"layers.{layer}.{weight}.{side[-1].lower()}"] = matrix
    return named


def _check_versions(llm: LLM, other: dict[str, np.ndarray]) -> None:
    """Tokens have the version of their adapter: that at the start of the request, and of a continued one the latest."""
    params, prompts = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True), [[1, 2, 3]]
    before = llm.update_lora("policy", other, scale=np.float32(SCALE))  # pyright: ignore[reportArgumentType]
    stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, params, lora="policy")
    next(stream)
    with llm.rollout_stream(prompts, params, lora="policy") as rollouts:
        rollouts.abort()
        partial = rollouts.result()
    list(stream)
    [output] = stream.outputs.values()
    assert output.outputs[0].weight_versions == [before] * 60
    after = llm.update_lora("policy", other, scale=SCALE)
    assert after == before + 1
    whole = llm.rollout(partial)[0]
    generated = int(partial[0].loss_mask.sum())
    assert whole.weight_versions.tolist() == [-1] * 3 + [before] * generated + [after] * (60 - generated)
    assert llm.rollout(prompts, params, lora="file-b")[0].weight_versions.max() == llm.weights_version == 0


def test_an_adapter_of_arrays_writes_what_it_writes_from_files(tmp_path: Path) -> None:
    shapes = shapes_of(GOLDEN / "llama_gqa")
    folders = [write_adapter(tmp_path / "a", shapes, ATTENTION), write_adapter(tmp_path / "b", shapes, ALL, seed=1)]
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    with tiny_llm(max_loras=3, max_lora_rank=4, loras={"file-a": str(folders[0])}) as llm:
        own = ours(first, llm.model.config.head_dim)
        expected, plain = written(llm, "file-a"), written(llm, None)
        assert expected != plain
        llm.update_lora("policy", first, scale=SCALE)
        assert written(llm, "policy") == written(llm, "policy")
        compilations = CompileCounter()
        assert written(llm, "policy") == expected
        llm.update_lora("policy", {name.removeprefix("base_model.model."): leaf for name, leaf in first.items()})
        assert written(llm, "policy") != expected
        llm.update_lora(
            "policy",
            {name.replace("model.model.", "model.model.language_model."): leaf for name, leaf in first.items()},
            scale=SCALE,
        )
        assert written(llm, "policy") == expected
        state = nnx.State({f"{name}_lora": nnx.LoRAParam(leaf) for name, leaf in own.items()})
        names = {f"layers.*.{weight}.{side}_lora": f"layers.*.{weight}.{side}" for weight in "qkvo" for side in "ab"}
        llm.update_lora("policy", state, scale=SCALE, names=names)
        assert written(llm, "policy") == expected
        assert llm.update_lora("policy", second, scale=SCALE) == 4
        llm.unload_lora("file-a")
        llm.load_lora("file-b", folders[1])
        assert written(llm, "policy") == written(llm, "file-b") != expected
        assert written(llm, None) == plain
        compilations.close()
        assert compilations.count == 0
        assert llm.loras["policy"] == "memory"
        wrongs: list[tuple[Any, dict[str, Any], str]] = [
            ({}, {}, "no weights were given"),
            (own, {"scale": "2"}, "the scale of an adapter is a number"),
            ({**own, "layers.0.router.a": own["layers.0.q.a"]}, {}, "this is not a matrix of an adapter"),
            ({**own, "layers.0.q.a": own["layers.0.q.a"][1:]}, {}, "do not fit the model's weight"),
            ({**own, "layers.9.q.a": own["layers.0.q.a"], "layers.9.q.b": own["layers.0.q.b"]}, {}, "no such module"),
            ({"layers.0.q.a": own["layers.0.q.a"]}, {}, "without its other half"),
            ({"layers.0.q.a": own["layers.0.q.a"][:, :0]}, {}, "this is not a matrix of an adapter"),
            ({**own, "layers.0.q.a": own["layers.0.q.a"] * np.nan}, {}, "finite"),
            (
                {name: jnp.concatenate([leaf] * 2, -1 if name[-1] == "a" else 0) for name, leaf in own.items()},
                {},
                "rank",
            ),
        ]
        for matrices, options, words in wrongs:
            with pytest.raises(ModelError, match=words):
                llm.update_lora("policy", matrices, **options)
        for name in ("", None):
            with pytest.raises(ConfigError, match="an adapter has a name; got"):
                llm.update_lora(name, own)  # pyright: ignore[reportArgumentType]
        assert written(llm, "policy") == written(llm, "file-b")
        _check_versions(llm, first)
    with tiny_llm() as llm, pytest.raises(ConfigError, match="no room for adapters"):
        llm.update_lora("policy", own)
