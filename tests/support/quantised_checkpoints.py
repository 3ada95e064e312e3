"""Checkpoints of random weights in the words of GPTQ and AWQ or in float8, and the same weights unquantised."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

E, H, K, D, F, V, GROUP = 64, 4, 2, 16, 96, 64, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LINEAR = {
    "self_attn.q_proj": (E, H * D),
    "self_attn.k_proj": (E, K * D),
    "self_attn.v_proj": (E, K * D),
    "self_attn.o_proj": (H * D, E),
    "mlp.gate_proj": (E, F),
    "mlp.up_proj": (E, F),
    "mlp.down_proj": (F, E),
}
FUSED = {
    "self_attn.qkv_proj": (E, (H + 2 * K) * D),
    "self_attn.o_proj": (H * D, E),
    "mlp.gate_up_proj": (E, 2 * F),
    "mlp.down_proj": (F, E),
}
"""The linear layers of Phi-3."""
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
KINDS: dict[str, dict] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq, symmetric": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "gptq, second version, 8 bits": {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": -1,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "fp8, a tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8, modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "fp8, outputs": COMPRESSED,
    "fp8, blocks": {"quant_method": "fp8", "weight_block_size": [16, 32]},
    "fp8, blocks with a ragged edge": {"quant_method": "fp8", "weight_block_size": [48, 48]},
}


def quantised_layer(rng: np.random.Generator, inputs: int, outputs: int, how: dict) -> tuple[dict, np.ndarray]:
    """Random numbers of a linear layer and their scales, and its weight `[out, in]` by the format's definition."""
    make = _float8_layer if how["quant_method"] in ("fp8", "compressed-tensors", "modelopt") else _words_layer
    return make(rng, inputs, outputs, how)


def _float8_layer(rng: np.random.Generator, inputs: int, outputs: int, how: dict) -> tuple[dict, np.ndarray]:
    numbers = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    rows, columns = how.get("weight_block_size") or ((1 if how["quant_method"] != "fp8" else outputs), inputs)
    scales = rng.uniform(0.01, 0.1, (-(-outputs // rows), -(-inputs // columns))).astype(np.float32)
    every = scales.repeat(rows, axis=0).repeat(columns, axis=1)[:outputs, :inputs]
    if rows == outputs:
        scales = scales[0]
    name = "weight_scale_inv" if "weight_block_size" in how else "weight_scale"
    return {"weight": numbers, name: scales}, numbers.astype(np.float32) * every


def _words_layer(rng: np.random.Generator, inputs: int, outputs: int, how: dict) -> tuple[dict, np.ndarray]:
    """The weight is scale * (number - zero)."""
    bits, most = how["bits"], 1 << how["bits"]
    group = inputs if how["group_size"] == -1 else how["group_size"]
    numbers, zeros = rng.integers(0, most, (inputs, outputs)), rng.integers(0, most, (inputs // group, outputs))
    if how.get("sym"):
        zeros[:] = most // 2
    scales = (rng.uniform(0.5, 1.5, zeros.shape) / most / 4).astype(np.float16)
    weight = (numbers - np.repeat(zeros, group, axis=0)).astype(np.float32) * np.repeat(scales, group, axis=0)
    if how["quant_method"] == "awq":
        tensors = {
            "qweight": _columns_in_words(numbers, bits, awq=True),
            "qzeros": _columns_in_words(zeros, bits, awq=True),
        }
    else:
        less = 0 if how.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {"qweight": _columns_in_words(numbers.T, bits).T.copy()}
        tensors |= {"qzeros": _columns_in_words((zeros - less) % most, bits)}
        tensors |= {"g_idx": (np.arange(inputs) // group).astype(np.int32)}
    return tensors | {"scales": scales}, weight.T.copy()


def _columns_in_words(numbers: np.ndarray, bits: int, *, awq: bool = False) -> np.ndarray:
    """Neighbours of a row in words of 32 bits, one after the other."""
    words = np.zeros((len(numbers), numbers.shape[1] * bits // 32), np.uint32)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if awq else range(32 // bits)
    for column in range(words.shape[1]):
        for place, which in enumerate(order):
            words[:, column] |= numbers[:, column * 32 // bits + which].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def write_safetensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Also of float8, which the package does not write from numpy: a header's length, the header, the numbers."""
    kinds = {"float16": "F16", "float32": "F32", "int32": "I32", "float8_e4m3fn": "F8_E4M3"}
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": kinds[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    numbers = b"".join(tensor.tobytes() for tensor in tensors.values())
    file.write_bytes(len(described).to_bytes(8, "little") + described + numbers)


def write(directory: Path, how: dict, linear: Mapping[str, tuple[int, int]] = LINEAR, **changed: object) -> Path:
    """A random checkpoint, and the same weights unquantised in its folder `plain`.

    Args:
        linear: the sizes of a layer's quantised weights.
        changed: entries of the config of the quantisation.
    """
    return write_model(directory, CONFIG, {}, linear, how, **changed)


def write_model(
    directory: Path,
    config: dict,
    others: Mapping[str, tuple[int, ...]],
    linear: Mapping[str, tuple[int, int]],
    how: dict | None,
    **changed: object,
) -> Path:
    """A checkpoint as `write` makes it, of two layers.

    Args:
        others: the shapes of a layer's other weights beside its two norms.
        how: None: the checkpoint is unquantised, too.
    """
    rng, plain = np.random.default_rng(0), directory / "plain"
    plain.mkdir(parents=True, exist_ok=True)
    width, size = config["hidden_size"], config["vocab_size"]
    shared = {"model.embed_tokens.weight": (size, width), "lm_head.weight": (size, width)}
    shared |= {"model.norm.weight": (width,)}
    for i in range(2):
        shared |= {f"model.layers.{i}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        shared |= {f"model.layers.{i}.{name}.weight": shape for name, shape in others.items()}
    weights: dict[str, np.ndarray] = {name: rng.standard_normal(shape, np.float32) for name, shape in shared.items()}
    stored = dict(weights)
    for name, sizes in ((f"model.layers.{i}.{name}", sizes) for i in range(2) for name, sizes in linear.items()):
        if how is None:
            weight = rng.standard_normal(sizes[::-1], np.float32) / 8
            tensors = {"weight": weight}
        else:
            tensors, weight = quantised_layer(rng, *sizes, how)
        weights[f"{name}.weight"] = weight
        stored |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    for folder, kept in ((plain, weights), (directory, stored)):
        write_safetensors(kept, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    if how is not None:
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": how | changed}))
    return plain
