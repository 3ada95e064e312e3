"""Random GGUF files of a tiny Llama, in any quantisation."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

E, H, K, D, F, V = 256, 4, 2, 64, 512, 50  # rows of whole blocks, which have up to 256 values
METADATA = {
    "llama.embedding_length": E,
    "llama.attention.head_count": H,
    "llama.attention.head_count_kv": K,
    "llama.feed_forward_length": F,
    "llama.context_length": 256,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}
LAYER = {
    "attn_norm.weight": (E,),
    "attn_q.weight": (H * D, E),
    "attn_k.weight": (K * D, E),
    "attn_v.weight": (K * D, E),
    "attn_output.weight": (E, H * D),
    "ffn_norm.weight": (E,),
    "ffn_gate.weight": (F, E),
    "ffn_up.weight": (F, E),
    "ffn_down.weight": (E, F),
}


def write(
    file: Path,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    without: tuple[str, ...] = (),
    extra: dict[str, str] | None = None,
    vocab_size: int = V,
    layers: tuple[Mapping[str, str], ...] = ({},),
) -> dict[str, np.ndarray]:
    """Write a random model; the values that its tensors dequantise to.

    Args:
        kind: quantisation of the matrices.
        without: keys and tensors that are left out.
        extra: further metadata.
        layers: for each layer, the tensors that have another quantisation than `kind`.
    """
    rng, stored_values = np.random.default_rng(0), {}
    writer = gguf.GGUFWriter(file, architecture)
    for key in METADATA.keys() - set(without):
        writer.add_uint32(key, METADATA[key])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 5000.0)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    if "llama.block_count" not in without:
        writer.add_uint32("llama.block_count", len(layers))
    shapes = {"token_embd.weight": (vocab_size, E), "output_norm.weight": (E,), "output.weight": (vocab_size, E)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(len(layers)) for name, shape in LAYER.items()}
    kinds = {f"blk.{i}.{name}": other for i, others in enumerate(layers) for name, other in others.items()}
    for name, shape in shapes.items():
        if name in without:
            continue
        quantisation = gguf.GGMLQuantizationType[kinds.get(name, kind)]
        values = rng.standard_normal(shape, np.float32) / (np.sqrt(shape[-1]) if len(shape) == 2 else 1)
        used = quantisation if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        stored = _blocks(values, used, rng)
        writer.add_tensor(name, stored, raw_dtype=used)
        stored_values[name] = gguf.quants.dequantize(stored, used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored_values


def _blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """The values quantised, or any blocks where gguf only reads a kind; their scales are mostly finite."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return rng.integers(0, 256, gguf.quants.quant_shape_to_byte_shape(values.shape, kind), np.uint8)
