"""Hugging Face checkpoints: a directory with `config.json` and one or several files of weights (`weight_files.py`).

As in transformers 5, `tie_word_embeddings` holds where only one of embedding and head is stored, or both are the same; a head
that is stored with other numbers than the embedding is used.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError, shown
from jinfercept.models.checkpoint import StoredExperts, StoredTensor, TensorNames
from jinfercept.models.config import ARCHITECTURES, Family, ModelConfig
from jinfercept.models.fp8_weights import Float8Format
from jinfercept.models.fused_weights import Fused, Part, fused_parts, split_shapes, stored_rows
from jinfercept.models.gptq_weights import StoredType, WordFormat, is_named
from jinfercept.models.hf_config import architecture_name, config_from_hf
from jinfercept.models.hf_keys import text_config
from jinfercept.models.model_directory import read_json
from jinfercept.models.mxfp4_weights import MXFP4Format
from jinfercept.models.packed_rows import PackedRows, Packing
from jinfercept.models.reordered_rows import QWEN3_NEXT_NAMES, ReorderedRows, reordered_rows
from jinfercept.models.weight_files import Placed, placed_tensors, text_tensors

log = logging.getLogger("jinfercept")

BASES: dict[Family, str] = {"llama": "model.", "gemma": "model.", "qwen3_next": "model.", "gptj": "transformer."}
"""How the names of tensors begin."""
_COMPARED_ROWS = 4096

_LLAMA = TensorNames(
    embed={"embedding": StoredTensor("model.embed_tokens.weight")},
    layer={
        "attn_norm": StoredTensor("model.layers.{i}.input_layernorm.weight"),
        "q": StoredTensor("model.layers.{i}.self_attn.q_proj.weight", inputs=1),
        "k": StoredTensor("model.layers.{i}.self_attn.k_proj.weight", inputs=1),
        "v": StoredTensor("model.layers.{i}.self_attn.v_proj.weight", inputs=1),
        "o": StoredTensor("model.layers.{i}.self_attn.o_proj.weight", inputs=2),
        "q_bias": StoredTensor("model.layers.{i}.self_attn.q_proj.bias", flat=True),
        "k_bias": StoredTensor("model.layers.{i}.self_attn.k_proj.bias", flat=True),
        "v_bias": StoredTensor("model.layers.{i}.self_attn.v_proj.bias", flat=True),
        "q_norm": StoredTensor("model.layers.{i}.self_attn.q_norm.weight"),
        "k_norm": StoredTensor("model.layers.{i}.self_attn.k_norm.weight"),
        "q_row_norm": StoredTensor("model.layers.{i}.self_attn.q_norm.weight", flat=True),
        "k_row_norm": StoredTensor("model.layers.{i}.self_attn.k_norm.weight", flat=True),
        "ffn_norm": StoredTensor("model.layers.{i}.post_attention_layernorm.weight"),
        "gate": StoredTensor("model.layers.{i}.mlp.gate_proj.weight", inputs=1),
        "up": StoredTensor("model.layers.{i}.mlp.up_proj.weight", inputs=1),
        "down": StoredTensor("model.layers.{i}.mlp.down_proj.weight", inputs=1),
        "router": StoredTensor("model.layers.{i}.mlp.gate.weight", inputs=1),
        "experts_gate_up": StoredExperts(
            ("model.layers.{i}.mlp.experts.{x}.gate_proj.weight", "model.layers.{i}.mlp.experts.{x}.up_proj.weight")
        ),
        "experts_down": StoredExperts(("model.layers.{i}.mlp.experts.{x}.down_proj.weight",)),
        "o_bias": StoredTensor("model.layers.{i}.self_attn.o_proj.bias"),
        "gate_bias": StoredTensor("model.layers.{i}.mlp.gate_proj.bias"),
        "up_bias": StoredTensor("model.layers.{i}.mlp.up_proj.bias"),
        "down_bias": StoredTensor("model.layers.{i}.mlp.down_proj.bias"),
    },
    head={"norm": StoredTensor("model.norm.weight"), "unembed": StoredTensor("lm_head.weight")},
    ignored=(".rotary_emb.inv_freq",),
)
_NAMES: dict[Family, TensorNames] = {
    "llama": _LLAMA,
    "gemma": _LLAMA,
    "qwen3_next": replace(_LLAMA, layer={**_LLAMA.layer, **QWEN3_NEXT_NAMES}),
    "gptj": TensorNames(
        embed={"embedding": StoredTensor("transformer.wte.weight")},
        layer={
            "norm": StoredTensor("transformer.h.{i}.ln_1.weight"),
            "norm_bias": StoredTensor("transformer.h.{i}.ln_1.bias"),
            "q": StoredTensor("transformer.h.{i}.attn.q_proj.weight", inputs=1),
            "k": StoredTensor("transformer.h.{i}.attn.k_proj.weight", inputs=1),
            "v": StoredTensor("transformer.h.{i}.attn.v_proj.weight", inputs=1),
            "o": StoredTensor("transformer.h.{i}.attn.out_proj.weight", inputs=2),
            "up": StoredTensor("transformer.h.{i}.mlp.fc_in.weight", inputs=1),
            "up_bias": StoredTensor("transformer.h.{i}.mlp.fc_in.bias"),
            "down": StoredTensor("transformer.h.{i}.mlp.fc_out.weight", inputs=1),
            "down_bias": StoredTensor("transformer.h.{i}.mlp.fc_out.bias"),
        },
        head={
            "norm": StoredTensor("transformer.ln_f.weight"),
            "norm_bias": StoredTensor("transformer.ln_f.bias"),
            "unembed": StoredTensor("lm_head.weight"),
            "unembed_bias": StoredTensor("lm_head.bias"),
        },
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
}

_POST_NORMS = {
    "attn_post_norm": StoredTensor("model.layers.{i}.post_attention_layernorm.weight"),
    "ffn_norm": StoredTensor("model.layers.{i}.pre_feedforward_layernorm.weight"),
    "ffn_post_norm": StoredTensor("model.layers.{i}.post_feedforward_layernorm.weight"),
}
"""Norms of the layers that norm their outputs."""
_MIXTRAL_NAMES = {
    "router": StoredTensor("model.layers.{i}.block_sparse_moe.gate.weight", inputs=1),
    "experts_gate_up": StoredExperts(
        (
            "model.layers.{i}.block_sparse_moe.experts.{x}.w1.weight",
            "model.layers.{i}.block_sparse_moe.experts.{x}.w3.weight",
        )
    ),
    "experts_down": StoredExperts(("model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight",)),
}
_STACKED_NAMES = {
    "experts_gate_up": StoredExperts(("model.layers.{i}.mlp.experts.gate_up_proj",)),
    "experts_down": StoredExperts(("model.layers.{i}.mlp.experts.down_proj",)),
}
_BIASED_NAMES = {
    "router": StoredTensor("model.layers.{i}.mlp.router.weight", inputs=1),
    "router_bias": StoredTensor("model.layers.{i}.mlp.router.bias"),
    "experts_gate_up": StoredExperts(("model.layers.{i}.mlp.experts.gate_up_proj",), "interleaved"),
    "experts_gate_up_bias": StoredExperts(("model.layers.{i}.mlp.experts.gate_up_proj_bias",), "interleaved"),
    "experts_down": StoredExperts(("model.layers.{i}.mlp.experts.down_proj",), "ours"),
    "experts_down_bias": StoredExperts(("model.layers.{i}.mlp.experts.down_proj_bias",), "ours"),
    "sinks": StoredTensor("model.layers.{i}.self_attn.sinks"),
}
"""Of gpt-oss."""
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
FUSED: Fused = {
    "self_attn.qkv_proj.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
"""Of Phi-3."""


@dataclass(frozen=True)
class HFCheckpoint:
    """A directory's config and the headers of its weight files."""

    config: ModelConfig
    names: TensorNames
    shapes: Mapping[str, tuple[int, ...]]
    _placed: Mapping[str, Placed] = field(repr=False)
    _words: WordFormat | Float8Format | MXFP4Format | None
    _packed: frozenset[str] = field(repr=False)
    _parts: Mapping[str, Part] = field(repr=False)
    _reordered: Mapping[str, ReorderedRows] = field(repr=False)

    @classmethod
    def open(cls, directory: Path, *, weights: bool = True) -> "HFCheckpoint":
        """Read the config and the headers; a directory without weights has no shapes.

        Args:
            weights: whether files that an index names have to be there.

        Raises:
            ModelError: `config.json` is missing or not supported, or a file is missing or cannot be read.
        """
        config, parsed = read_config(directory), read_json(directory / "config.json")
        architecture = ARCHITECTURES[architecture_name(parsed)]
        placed = placed_tensors(directory, BASES[config.family], partly=not weights)
        if config.delta_net is not None or text_config(parsed) is not parsed:
            placed = text_tensors(placed)
        stored = {name: StoredType(at.file.shapes[at.name], at.file.dtypes[at.name]) for name, at in placed.items()}
        shapes, packed = {name: of.shape for name, of in stored.items()}, frozenset[str]()
        in_words = next((name for name in stored if name.endswith(".qweight")), None)
        if parsed.get("quantization_config") is None and (in_words or not stored):
            parsed = _stated_apart(directory)
        if (words := _word_format(parsed)) is not None:
            packed = words.packed(stored)
            shapes = words.shapes(shapes, packed)
        elif in_words is not None:
            raise ModelError(
                "weights are stored in words, and nothing says in which",
                got=in_words[:200],
                fix="put quantization_config into config.json, or quantize_config.json beside it",
            )
        parts = fused_parts(shapes, FUSED, config) if architecture.fused else {}
        shapes = split_shapes(shapes, parts)
        reordered = {} if config.delta_net is None else reordered_rows(shapes, config.delta_net)
        reordered_names = {tensor for weight in reordered.values() for tensor, _ in weight.tensors}
        shapes = {name: shape for name, shape in shapes.items() if name not in reordered_names}
        shapes |= {name: weight.shape for name, weight in reordered.items()}
        return cls(config, names_of(config, shapes), shapes, placed, words, packed, parts, reordered)._tied_as_stored()

    def _tied_as_stored(self) -> "HFCheckpoint":
        """The config with embedding and head tied as the stored tensors allow."""
        embedding, head = self.names.embed["embedding"], self.names.head["unembed"]
        if not self.config.tie_embeddings or head.name not in self.shapes:
            return self
        if embedding.name not in self.shapes:
            return replace(self, names=replace(self.names, embed={"embedding": head}))
        if self._are_equal(embedding.name, head.name):
            return self
        log.warning(
            "config.json ties the head to the embedding, but %s is stored with other numbers: it is used, as in transformers",
            head.name,
        )
        return replace(self, config=replace(self.config, tie_embeddings=False))

    def _are_equal(self, first: str, second: str) -> bool:
        shape = self.shapes[first]
        if shape != self.shapes[second] or not shape:
            return False
        starts = range(0, shape[0], _COMPARED_ROWS)
        parts = (slice(start, min(start + _COMPARED_ROWS, shape[0])) for start in starts)
        return all(np.array_equal(self.read(first, rows), self.read(second, rows)) for rows in parts)

    @property
    def quantization(self) -> str | None:
        """See `PackedCheckpoint`."""
        return None if self._words is None or (self.shapes and not self._packed) else self._words.method

    def packing(self, name: str) -> Packing | None:
        """See `PackedCheckpoint`. Where the weights are not there, of layers whose names say that they are quantised."""
        if self._words is None:
            return None
        if self.shapes:
            stored = self._parts[name].tensor if name in self._parts else name
            return self._words.packing(self.shapes[name][1]) if stored in self._packed else None
        if isinstance(self._words, MXFP4Format):
            return self._words.packing(0) if name.endswith(_EXPERTS) else None
        is_inside = ".layers." in name or ".h." in name
        is_linear = is_inside and name.endswith(".weight") and "norm" not in name and ".ln_" not in name
        is_packed = is_linear or (self._words.head and name == self.names.head["unembed"].name)
        inputs = self._words.group_size
        if not is_packed or inputs is None or is_named(name, self._words.unquantised):
            return None
        return self._words.packing(inputs)

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        if (reordered := self._reordered.get(name)) is not None:
            return reordered.read(
                rows, lambda tensor, part: self._placed[tensor].file.read(self._placed[tensor].name, part)
            )
        packing = self.packing(name)
        if packing is None:
            tensor, rows = stored_rows(self._parts, name, rows)
            file, stored = self._placed[tensor]
            return file.read(stored, rows)
        dense, shape = self.read_packed(name, rows).dense(packing.zero), self.shapes[name]
        return dense if len(shape) == 2 else dense.reshape(-1, *shape[:0:-1]).swapaxes(1, 2)

    def read_packed(self, name: str, rows: slice) -> PackedRows:
        """See `PackedCheckpoint`."""
        assert self._words is not None
        tensor, rows = stored_rows(self._parts, name, slice(*rows.indices(self.shapes[name][0])[:2]))

        def read(part: str, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
            file, stored = self._placed[f"{tensor.removesuffix('weight')}{part}"]
            return file.read(stored, index)

        return self._words.rows(read, rows)


def names_of(config: ModelConfig, shapes: Iterable[str] = ()) -> TensorNames:
    """Where the weights of a model are, in a checkpoint of tensors with these names. Mixtral's experts have names of their own;
    experts as transformers 5 has them in memory are stacked."""
    layer_names = dict[str, StoredTensor | StoredExperts]()
    if config.post_norms:
        layer_names |= _POST_NORMS
    if config.experts is not None and config.experts.biased:
        layer_names |= _BIASED_NAMES
    elif any(".block_sparse_moe." in name for name in shapes):
        layer_names |= _MIXTRAL_NAMES
    elif any(name.endswith(".experts.down_proj") for name in shapes):
        layer_names |= _STACKED_NAMES
    names = _NAMES[config.family]
    return replace(names, layer={**names.layer, **layer_names})


def _stated_apart(directory: Path) -> Mapping[str, Any]:
    """The quantisation in AutoGPTQ's `quantize_config.json` or AutoAWQ's `quant_config.json`, as in `config.json`."""
    for file in (directory / "quantize_config.json", directory / "quant_config.json"):
        if file.is_file():
            stated = read_json(file)
            if not isinstance(stated, dict):
                raise ModelError(f"{file.name} is a JSON object", got=shown(stated), fix="download it again")
            if "w_bit" in stated:
                names = {"w_bit": "bits", "q_group_size": "group_size"}
                stated = {"quant_method": "awq"} | {names.get(key, key): value for key, value in stated.items()}
            return {"quantization_config": {"quant_method": "gptq"} | stated}
    return {}


def _word_format(config: Mapping[str, Any]) -> WordFormat | Float8Format | MXFP4Format | None:
    """How linear layers are quantised, by `config.json`; None: they are not. Raises `ModelError` for other quantisations."""
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError("quantization_config is an object", got=shown(stated), fix="correct config.json")
    match stated.get("quant_method"):
        case "gptq" | "awq":
            return WordFormat.from_config(stated)
        case "fp8" | "compressed-tensors":
            return Float8Format.from_config(stated)
        case "mxfp4":
            return MXFP4Format()
        case other:
            raise ModelError(
                "the checkpoint's quantisation is not supported",
                got=shown(other),
                fix="use a checkpoint of gptq, awq, fp8 or mxfp4, a GGUF file, or one that is not quantised",
            )


def read_config(directory: Path) -> ModelConfig:
    """The config in a directory, without its weights. Raises `ModelError` if it is missing or not supported."""
    config_file, generation_file = directory / "config.json", directory / "generation_config.json"
    _refuse_adapter(directory / "adapter_config.json")
    if not config_file.is_file():
        files = sorted(file.name for file in directory.glob("*.gguf"))
        fix = f"name its file {files[0]}" if files else "name a Hugging Face directory"
        raise ModelError("the model's directory has no config.json", got=directory, fix=fix)
    generation = read_json(generation_file) if generation_file.is_file() else None
    return config_from_hf(read_json(config_file), generation)


def _refuse_adapter(file: Path) -> None:
    """Raise `ModelError` for a directory with an adapter, which transformers would put onto its base model."""
    if file.is_file():
        adapter = read_json(file)
        base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
        raise ModelError(
            "the directory has an adapter (LoRA) of another model",
            got=f"{file.name} of {str(base)[:200]}",
            fix="name its base model, and this directory in `loras` (--lora-modules NAME=DIRECTORY)",
        )
