"""Adapters are read as PEFT writes them, beside quantised weights too; what this cannot serve is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.llm import LLM
from jinfercept.models.adapters import AdapterWeights
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load, read_config
from jinfercept.models.model import Model
from jinfercept.models.peft_adapter import PREFIX, read_adapter
from jinfercept.models.protocol import Params
from jinfercept.sampling_params import SamplingParams
from tests.support import tiny_gguf
from tests.support.peft_adapters import ALL, GPTJ, PHI, shapes_of, write_adapter
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import streams

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIG = read_config(GOLDEN / "llama_gqa")
WHOLE = "base_model.model.model.layers.1.self_attn.q_proj"


def written(directory: Path, *targets: str, base: str = "llama_gqa", **options: Any) -> Path:
    return write_adapter(directory, shapes_of(GOLDEN / base), targets or ALL, **options)


def rewrite(directory: Path, change: Any) -> None:
    file = directory / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def change_of(adapter: AdapterWeights, layer: int, name: str) -> np.ndarray:
    """What is added to a weight, `[in, out]`."""
    a, b = adapter.layers[layer][name]
    return a.reshape(-1, a.shape[-1]) @ b.reshape(len(b), -1)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"lora_alpha": 6}, 6 / 4),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 10}}, 8 / 4),
        ({"init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}, "future_key": None}, 8 / 4),
    ],
)
def test_an_adapter_has_the_scale_of_its_config(tmp_path: Path, options: dict[str, Any], scale: float) -> None:
    adapter = read_adapter(written(tmp_path, **options), CONFIG)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    a, b = tensors[f"{WHOLE}.lora_A.weight"], tensors[f"{WHOLE}.lora_B.weight"]
    np.testing.assert_allclose(change_of(adapter, 1, "q"), scale * (b @ a).T, rtol=1e-5, atol=1e-6)
    assert adapter.rank == 4
    assert adapter.weights == {"q", "k", "v", "o", "gate", "up", "down"}


def test_modules_that_are_fused_are_those_of_their_parts(tmp_path: Path) -> None:
    config = read_config(GOLDEN / "phi3")
    adapter = read_adapter(written(tmp_path, *PHI, base="phi3"), config)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.qkv_proj"
    whole = 2 * (tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]).T
    parts = np.concatenate([change_of(adapter, 0, part) for part in "qkv"], axis=1)
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)


KEYS_OF_PHI = {"A": (4, 32), "B": (16, 4)}
"""Shapes of an adapter's matrices for the keys."""


def test_a_module_beside_its_part_is_refused(tmp_path: Path) -> None:
    written(tmp_path, *PHI, base="phi3")
    name = "base_model.model.model.layers.0.self_attn"
    own = {f"{name}.k_proj.lora_{side}.weight": np.zeros(shape, np.float32) for side, shape in KEYS_OF_PHI.items()}
    rewrite(tmp_path, lambda tensors: tensors | own)
    with pytest.raises(ModelError, match=r"two modules .* change one weight; got k of layer 0, again by .*qkv_proj"):
        read_adapter(tmp_path, read_config(GOLDEN / "phi3"))


@pytest.mark.parametrize("inner", ["model.language_model.", "language_model.model."])
def test_adapters_of_models_that_read_images_are_those_of_the_part_that_reads_text(tmp_path: Path, inner: str) -> None:
    alone = read_adapter(written(tmp_path), CONFIG)
    rewrite(
        tmp_path, lambda tensors: {name.replace(PREFIX + "model.", PREFIX + inner): t for name, t in tensors.items()}
    )
    assert any(f".{inner}layers.1." in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert read_adapter(tmp_path, CONFIG).digest == alone.digest


@pytest.mark.parametrize("inner", ["model.language_model.", "language_model.model.", "model.language_model.model."])
@pytest.mark.parametrize(
    "pattern",
    [
        "{inner}layers.1.self_attn.q_proj",
        "^{inner}layers.1.self_attn.q_proj",
        r".*language_model.*\.1\..*q_proj",
        "layers.1.self_attn.q_proj",
    ],
)
def test_patterns_are_matched_against_the_names_that_peft_has(tmp_path: Path, inner: str, pattern: str) -> None:
    pattern, module = pattern.format(inner=inner), f"{PREFIX}{inner}layers.1.self_attn.q_proj"
    written(tmp_path, lora_alpha=6, rank_pattern={pattern: 2}, alpha_pattern={pattern: 10, "q_proj": 1})

    def renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = {name.replace(PREFIX + "model.", PREFIX + inner): tensor for name, tensor in tensors.items()}
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        return tensors | {a: tensors[a][:2].copy(), b: tensors[b][:, :2].copy()}

    rewrite(tmp_path, renamed)
    tensors, adapter = load_file(tmp_path / "adapter_model.safetensors"), read_adapter(tmp_path, CONFIG)
    for layer, name, scale in ((1, "q", 10 / 2), (0, "q", 1 / 4), (1, "k", 6 / 4)):
        stored = module.replace("layers.1.", f"layers.{layer}.").replace("q_proj", f"{name}_proj")
        a, b = tensors[f"{stored}.lora_A.weight"], tensors[f"{stored}.lora_B.weight"]
        np.testing.assert_allclose(change_of(adapter, layer, name), scale * (b @ a).T, rtol=1e-5, atol=1e-6)


def test_adapters_of_the_part_that_reads_images_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {name.replace(PREFIX, f"{PREFIX}model.visual."): t for name, t in tensors.items()},
    )
    with pytest.raises(ModelError, match=r"no such module for an adapter; got model.visual.model.layers"):
        read_adapter(tmp_path, CONFIG)


def test_gptj_has_modules_of_its_own(tmp_path: Path) -> None:
    adapter = read_adapter(written(tmp_path, *GPTJ, base="gptj"), read_config(GOLDEN / "gptj"))
    assert adapter.weights == {"q", "k", "v", "o", "up", "down"}


def test_adapters_with_the_same_numbers_have_the_same_digest(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"lora_dropout": 0.5}, {"lora_alpha": 9}, {"seed": 1}]
    first, same, scaled, other = (read_adapter(written(tmp_path, **options), CONFIG).digest for options in variants)
    assert first == same
    assert len({first, scaled, other}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "of type LORA are served; got 'IA3'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters="),
        ({"trainable_token_indices": [3]}, "trainable_token_indices="),
        ({"key_of_next_year": {"a": 1}}, "key_of_next_year="),
        ({"init_lora_weights": "pissa_niter_4"}, "started from parts of the base's weights.*pissa_niter_4"),
        ({"use_dora": "false"}, "use_dora='false'"),
        ({"use_rslora": "false"}, "use_rslora of adapter_config.json is wrong: .* boolean; got 'false'"),
        ({"rank_pattern": []}, "rank_pattern of adapter_config.json is wrong"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern.q_proj of .* valid number; got '8'"),
        ({"rank_pattern": {"q_proj": 4.0}}, "rank_pattern.q_proj of .* valid integer"),
        ({"rank_pattern": {"q_proj": -1}}, "greater than 0; got -1"),
        ({"r": "4"}, "r of adapter_config.json is wrong: .* valid integer; got '4'"),
        ({"r": True}, "valid integer; got True"),
        ({"r": 0}, "greater than 0; got 0"),
        ({"r": None}, "r of adapter_config.json is wrong: Field required"),
        ({"lora_alpha": "big"}, "lora_alpha of adapter_config.json is wrong: .* valid number; got 'big'"),
        ({"lora_alpha": 10**400}, "lora_alpha of adapter_config.json is wrong"),
        ({"rank_pattern": {f"a{number}": 4 for number in range(1025)}}, "rank_pattern of .* at most 1024 items"),
        ({"rank_pattern": {"(.*": 4}}, r"rank_pattern.* is no regular expression without look-around"),
        ({"rank_pattern": {"a{1000}{1000}": 4}}, r"rank_pattern.* is no regular expression"),
        ({"r": 3}, "do not fit the model's weight.*rank 3"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_adapter(written(tmp_path, **options), CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"base_model.model.lm_head.lora_embedding_A": t[f"{WHOLE}.lora_A.weight"]}, "nothing else; got"),
        (lambda t: {name: tensor for name, tensor in t.items() if "lora_B" not in name}, "without its other half"),
        (lambda t: {name.replace("layers.1.", "layers.7."): tensor for name, tensor in t.items()}, r"layers\.7\."),
        (lambda t: {name.replace("q_proj", "c_attn"): tensor for name, tensor in t.items()}, "no such module.*c_attn"),
        (lambda t: t | {f"{WHOLE}.lora_A.weight": np.zeros((4, 8), np.float32)}, r"do not fit.*lora_A \[4, 8\]"),
        (lambda t: t | {f"{WHOLE}.lora_A.weight": np.full((4, 32), np.nan, np.float32)}, "finite"),
        (lambda t: {name.replace("layers.1.", "layers.{i}."): tensor for name, tensor in t.items()}, "no such module"),
        (lambda t: {name.replace("layers.1.", "layers.01."): tensor for name, tensor in t.items()}, "no such module"),
        (
            lambda t: {name.replace("rs.1.", f"rs.{'1' * 5000}."): tensor for name, tensor in t.items()},
            "no such module",
        ),
        (lambda t: t | {f"{WHOLE}.lora_A.default.weight": t[f"{WHOLE}.lora_A.weight"]}, "lora_A.* beside "),
        (lambda t: t | {f"{WHOLE}.lora_A.weight": np.zeros((4, 32), np.int32)}, "finite floating-point"),
        (
            lambda t: {name.replace("self_attn.q_proj", "mlp.experts.0.w1"): tensor for name, tensor in t.items()},
            "adapters of experts are not served",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    written(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        read_adapter(tmp_path, CONFIG)


def test_a_layer_with_experts_has_no_modules_in_their_place(tmp_path: Path) -> None:
    config = read_config(GOLDEN / "qwen3_moe_mixed")
    experts = next(i for i in range(config.num_layers) if not config.kind(i).is_dense)
    attention = write_adapter(tmp_path, shapes_of(GOLDEN / "qwen3_moe_mixed"), ("q_proj",))
    assert read_adapter(attention, config).weights == {"q"}
    name = f"base_model.model.model.layers.{experts}.mlp.up_proj"
    pair = np.zeros((4, config.hidden_size), np.float32), np.zeros((config.ffn_size, 4), np.float32)
    rewrite(tmp_path, lambda t: t | {f"{name}.lora_{side}.weight": m for side, m in zip("AB", pair, strict=True)})
    with pytest.raises(ModelError, match="experts in place of the module"):
        read_adapter(tmp_path, config)


def test_a_rank_above_the_room_is_refused(tmp_path: Path) -> None:
    assert read_adapter(written(tmp_path), CONFIG, 4).rank == 4
    with pytest.raises(ModelError, match=r"rank 4 of .*room for 3; fix: max_lora_rank=4"):
        read_adapter(tmp_path, CONFIG, 3)


def test_a_directory_without_an_adapter_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without adapter_config\.json"):
        read_adapter(tmp_path, CONFIG)
    written(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(["LORA"]))
    with pytest.raises(ModelError, match="of type LORA"):
        read_adapter(tmp_path, CONFIG)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_adapter(tmp_path, CONFIG)


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(seed).integers(0, 100, 5 + 4 * seed).tolist()} for seed in range(3)
]


@pytest.mark.parametrize("kind", [pytest.param("Q8_0", marks=pytest.mark.slow), "Q4_1"])
def test_weights_that_stay_quantised_have_adapters(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, kind=kind, layers=({}, {}), vocab_size=VOCAB)
    places = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    places |= {"attn_output": "self_attn.o_proj"} | {
        f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")
    }
    shapes = {
        f"model.layers.{i}.{places[name.removesuffix('.weight')]}.weight": shape
        for i in range(2)
        for name, shape in tiny_gguf.LAYER.items()
        if name.removesuffix(".weight") in places
    }
    written = {letter: write_adapter(tmp_path / letter, shapes, seed=place) for place, letter in enumerate("ab")}
    flags: dict[str, Any] = {"dtype": "float32", "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    flags |= {"profile": "paper-gptj-6b-a100", "kv_tokens": 1024, "tokenizer": byte_level()}
    with LLM(file, quantization="gguf", loras=written, **flags) as llm:
        made = streams(llm.generate(PROMPTS * 3, GREEDY, lora=[name for name in (None, "a", "b") for _ in PROMPTS]))
    dense, expected = load(file, dtype="float32", quantization="none"), list[list[int]]()
    for adapter in (None, *written.values()):
        params = dense.params if adapter is None else with_change(dense.model, dense.params, adapter)
        with LLM(dense.model, params=params, **flags) as llm:
            expected += streams(llm.generate(PROMPTS, GREEDY))
    assert made == expected


def with_change(model: Model, params: Params, directory: Path) -> Params:
    """Weights, apart, with those of an adapter added."""
    layers = list[dict[str, Any]]()
    for layer, factors in zip(separate(params).layers, read_adapter(directory, model.config).layers, strict=True):
        changes = {name: np.tensordot(a, b, axes=1) for name, (a, b) in factors.items()}
        layers.append({name: weight + changes.get(name, 0.0) for name, weight in layer.items()})
    return params._replace(layers=tuple(layers))
