"""Hugging Face checkpoints: a directory with `config.json` and one or several files of weights (`weight_files.py`).

As in transformers 5, `tie_word_embeddings` holds where only one of embedding and head is stored, or both are the same; a head
that is stored with other numbers than the embedding is used.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError, shown
from jinfercept.models.checkpoint import PackedRows, Packing, StoredExperts, TensorNames
from jinfercept.models.config import ARCHITECTURES, Family, ModelConfig
from jinfercept.models.hf_config import architecture_name, config_from_hf, with_draft_layer
from jinfercept.models.hf_keys import text_config
from jinfercept.models.model_directory import read_json
from jinfercept.models.quantized_formats import MXFP4Format, QuantizedFormat, StoredType, format_of, is_named
from jinfercept.models.stored_rows import Fused, StoredRows, rows_in, shapes_with
from jinfercept.models.weight_files import Placed, placed_tensors, text_tensors

log = logging.getLogger("jinfercept")

BASES: dict[Family, str] = {"llama": "model.", "gemma": "model.", "gemma4": "model."}
BASES |= {"qwen3_next": "model.", "nemotron_h": "model.", "gptj": "transformer."}
"""How the names of tensors begin."""
_COMPARED_ROWS = 4096

_LLAMA = TensorNames.of(
    "model.embed_tokens.weight",
    layer={
        "attn_norm": "model.layers.{i}.input_layernorm.weight",
        "q": "model.layers.{i}.self_attn.q_proj.weight",
        "k": "model.layers.{i}.self_attn.k_proj.weight",
        "v": "model.layers.{i}.self_attn.v_proj.weight",
        "o": "model.layers.{i}.self_attn.o_proj.weight",
        "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "q_row_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_row_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "gate": "model.layers.{i}.mlp.gate_proj.weight",
        "up": "model.layers.{i}.mlp.up_proj.weight",
        "down": "model.layers.{i}.mlp.down_proj.weight",
        "router": "model.layers.{i}.mlp.gate.weight",
        "experts_gate_up": StoredExperts(
            ("model.layers.{i}.mlp.experts.{x}.gate_proj.weight", "model.layers.{i}.mlp.experts.{x}.up_proj.weight")
        ),
        "experts_up": StoredExperts(("model.layers.{i}.mlp.experts.{x}.up_proj.weight",)),
        "experts_down": StoredExperts(("model.layers.{i}.mlp.experts.{x}.down_proj.weight",)),
        "o_bias": "model.layers.{i}.self_attn.o_proj.bias",
        "gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
        "up_bias": "model.layers.{i}.mlp.up_proj.bias",
        "down_bias": "model.layers.{i}.mlp.down_proj.bias",
    },
    head={"norm": "model.norm.weight", "unembed": "lm_head.weight"},
    ignored=(".rotary_emb.inv_freq",),
)
_QWEN3_NEXT_NAMES = {
    "delta_qkvz": "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
    "delta_ba": "model.layers.{i}.linear_attn.in_proj_ba.weight",
    "delta_taps": "model.layers.{i}.linear_attn.conv1d.weight",
    "delta_decay": "model.layers.{i}.linear_attn.A_log",
    "delta_step_bias": "model.layers.{i}.linear_attn.dt_bias",
    "delta_norm": "model.layers.{i}.linear_attn.norm.weight",
    "delta_o": "model.layers.{i}.linear_attn.out_proj.weight",
    "shared_gate": "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
    "shared_up": "model.layers.{i}.mlp.shared_expert.up_proj.weight",
    "shared_down": "model.layers.{i}.mlp.shared_expert.down_proj.weight",
    "shared_factor": "model.layers.{i}.mlp.shared_expert_gate.weight",
    "draft_embedding_norm": "model.layers.{i}.mtp.pre_fc_norm_embedding.weight",
    "draft_hidden_norm": "model.layers.{i}.mtp.pre_fc_norm_hidden.weight",
    "draft_fc": "model.layers.{i}.mtp.fc.weight",
    "draft_norm": "model.layers.{i}.mtp.norm.weight",
}
"""Where Qwen3-Next's weights are that others do not have; those of the layer that drafts as `text_tensors` names them."""
_NEMOTRON_H_NAMES = {
    "mamba_in": "model.layers.{i}.linear_attn.in_proj.weight",
    "mamba_taps_bias": "model.layers.{i}.linear_attn.conv1d.bias",
    "mamba_skip": "model.layers.{i}.linear_attn.D",
    "mamba_norm": "model.layers.{i}.linear_attn.norm.weight",
    "latent_in": "model.layers.{i}.mlp.fc1_latent_proj.weight",
    "latent_out": "model.layers.{i}.mlp.fc2_latent_proj.weight",
}
"""Where Nemotron-H's weights are that Qwen3-Next does not have, as `text_name` names them."""
_GEMMA4 = _LLAMA.with_layer(
    {
        "router": "model.layers.{i}.router.proj.weight",
        "router_norm": "model.layers.{i}.router.scale",
        "router_scale": "model.layers.{i}.router.per_expert_scale",
        "dense_post_norm": "model.layers.{i}.post_feedforward_layernorm_1.weight",
        "experts_norm": "model.layers.{i}.pre_feedforward_layernorm_2.weight",
        "experts_post_norm": "model.layers.{i}.post_feedforward_layernorm_2.weight",
        "experts_gate_up": StoredExperts(("model.layers.{i}.experts.gate_up_proj",)),
        "experts_down": StoredExperts(("model.layers.{i}.experts.down_proj",)),
        "per_layer_gate": "model.layers.{i}.per_layer_input_gate.weight",
        "per_layer_up": "model.layers.{i}.per_layer_projection.weight",
        "per_layer_norm": "model.layers.{i}.post_per_layer_input_norm.weight",
        "layer_scale": "model.layers.{i}.layer_scalar",
    }
).with_embed(
    {
        "per_layer_embedding": "model.embed_tokens_per_layer.weight",
        "per_layer_projection": "model.per_layer_model_projection.weight",
        "per_layer_projection_norm": "model.per_layer_projection_norm.weight",
        "pre_projection": "pre_projection.weight",
    }
)
_GEMMA4 = _GEMMA4.with_head(
    {
        "post_projection": "post_projection.weight",
        "centroids": "masked_embedding.centroids.weight",
        "token_order": "masked_embedding.token_ordering",
    }
)
_NAMES: dict[Family, TensorNames] = {
    "llama": _LLAMA,
    "gemma": _LLAMA,
    "gemma4": _GEMMA4,
    "qwen3_next": _LLAMA.with_layer(_QWEN3_NEXT_NAMES),
    "nemotron_h": _LLAMA.with_layer(_QWEN3_NEXT_NAMES | _NEMOTRON_H_NAMES),
    "gptj": TensorNames.of(
        "transformer.wte.weight",
        layer={
            "norm": "transformer.h.{i}.ln_1.weight",
            "norm_bias": "transformer.h.{i}.ln_1.bias",
            "q": "transformer.h.{i}.attn.q_proj.weight",
            "k": "transformer.h.{i}.attn.k_proj.weight",
            "v": "transformer.h.{i}.attn.v_proj.weight",
            "o": "transformer.h.{i}.attn.out_proj.weight",
            "up": "transformer.h.{i}.mlp.fc_in.weight",
            "up_bias": "transformer.h.{i}.mlp.fc_in.bias",
            "down": "transformer.h.{i}.mlp.fc_out.weight",
            "down_bias": "transformer.h.{i}.mlp.fc_out.bias",
        },
        head={
            "norm": "transformer.ln_f.weight",
            "norm_bias": "transformer.ln_f.bias",
            "unembed": "lm_head.weight",
            "unembed_bias": "lm_head.bias",
        },
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
}

_POST_NORMS = {
    "attn_post_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "ffn_post_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
"""Norms of the layers that norm their outputs."""
_MIXTRAL_NAMES = {
    "router": "model.layers.{i}.block_sparse_moe.gate.weight",
    "experts_gate_up": StoredExperts(
        (
            "model.layers.{i}.block_sparse_moe.experts.{x}.w1.weight",
            "model.layers.{i}.block_sparse_moe.experts.{x}.w3.weight",
        )
    ),
    "experts_down": StoredExperts(("model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight",)),
}
_STACKED_NAMES = {
    "experts_up": StoredExperts(("model.layers.{i}.mlp.experts.up_proj",)),
    "experts_gate_up": StoredExperts(("model.layers.{i}.mlp.experts.gate_up_proj",)),
    "experts_down": StoredExperts(("model.layers.{i}.mlp.experts.down_proj",)),
}
_CORRECTED_NAMES = {
    "router_correction": "model.layers.{i}.mlp.gate.e_score_correction_bias",
    **{
        f"shared_{part}": f"model.layers.{{i}}.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")
    },
}
"""Of GLM 4.5."""
_BIASED_NAMES = {
    "router": "model.layers.{i}.mlp.router.weight",
    "router_bias": "model.layers.{i}.mlp.router.bias",
    "experts_gate_up": StoredExperts(("model.layers.{i}.mlp.experts.gate_up_proj",), "interleaved"),
    "experts_gate_up_bias": StoredExperts(("model.layers.{i}.mlp.experts.gate_up_proj_bias",), "interleaved"),
    "experts_down": StoredExperts(("model.layers.{i}.mlp.experts.down_proj",), "ours"),
    "experts_down_bias": StoredExperts(("model.layers.{i}.mlp.experts.down_proj_bias",), "ours"),
    "sinks": "model.layers.{i}.self_attn.sinks",
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
    _words: QuantizedFormat | None
    _packed: Mapping[str, tuple[int, ...]] = field(repr=False)
    _rows: Mapping[str, StoredRows] = field(repr=False)

    @classmethod
    def open(cls, directory: Path, *, weights: bool = True, draft_layer: bool = False) -> "HFCheckpoint":
        """Read the config and the headers; a directory without weights has no shapes.

        Args:
            weights: whether files that an index names have to be there.
            draft_layer: whether the layer that drafts is read, too.

        Raises:
            ModelError: `config.json` is missing or not supported, or a file is missing or cannot be read.
        """
        config, parsed = read_config(directory, draft_layer=draft_layer), read_json(directory / "config.json")
        architecture = ARCHITECTURES[architecture_name(parsed)]
        placed = placed_tensors(directory, BASES[config.family], partly=not weights)
        if config.delta_net is not None or text_config(parsed) is not parsed:
            placed = text_tensors(placed, config)
        if parsed.get("num_nextn_predict_layers"):  # they stand behind the last layer, and draft
            placed = {name: at for name, at in placed.items() if not _is_behind(name, config.num_layers)}
        stored = {name: StoredType(at.file.shapes[at.name], at.file.dtypes[at.name]) for name, at in placed.items()}
        shapes, packed = {name: of.shape for name, of in stored.items()}, dict[str, tuple[int, ...]]()
        in_words = next((name for name in stored if name.endswith(".qweight")), None)
        if parsed.get("quantization_config") is None and (in_words or not stored):
            parsed = _stated_apart(directory)
        if (words := format_of(parsed.get("quantization_config"))) is not None:
            packed = words.weights(stored)
            shapes = {name: shape for name, shape in shapes.items() if not name.endswith(words.parts)} | packed
        elif in_words is not None:
            raise ModelError(
                "weights are stored in words, and nothing says in which",
                got=in_words[:200],
                fix="put quantization_config into config.json, or quantize_config.json beside it",
            )
        rows = rows_in(shapes, config, FUSED if architecture.fused else {})
        shapes = shapes_with(shapes, rows)
        return cls(config, names_of(config, shapes), shapes, placed, words, packed, rows)._tied_as_stored()

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
        """See `Checkpoint`."""
        return None if self._words is None or (self.shapes and not self._packed) else self._words.method

    def packing(self, name: str) -> Packing | None:
        """See `Checkpoint`. Where the weights are not there, of layers whose names say that they are quantised."""
        if self._words is None:
            return None
        if self.shapes:
            return self._rows[name].packing(self._packing_of) if name in self._rows else self._packing_of(name)
        if isinstance(self._words, MXFP4Format):
            return self._words.packing(0) if name.endswith(_EXPERTS) else None
        is_inside = ".layers." in name or ".h." in name
        is_linear = is_inside and name.endswith(".weight") and "norm" not in name and ".ln_" not in name
        is_packed = is_linear or (self._words.head and name == self.names.head["unembed"].name)
        inputs = self._words.group_size
        if not is_packed or inputs is None or is_named(name, self._words.unquantised):
            return None
        return self._words.packing(inputs)

    def _packing_of(self, tensor: str) -> Packing | None:
        return self._words.packing(self._packed[tensor][1]) if self._words and tensor in self._packed else None

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        return self._rows[name].read(rows, self._dense) if name in self._rows else self._dense(name, rows)

    def _dense(self, tensor: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        if (packing := self._packing_of(tensor)) is None:
            return self._read(tensor, rows)
        dense, shape = self._rows_of(tensor, rows).dense(packing.zero), self._packed[tensor]
        return dense if len(shape) == 2 else dense.reshape(-1, *shape[:0:-1]).swapaxes(1, 2)

    def read_packed(self, name: str, rows: slice) -> PackedRows:
        """See `Checkpoint`."""
        if name in self._rows:
            return self._rows[name].read_packed(rows, self._packing_of, self._rows_of)
        return self._rows_of(name, rows)

    def _rows_of(self, tensor: str, rows: slice) -> PackedRows:
        assert self._words is not None
        layer, rows = tensor.removesuffix("weight"), slice(*rows.indices(self._packed[tensor][0])[:2])
        return self._words.rows(lambda part, index: self._read(f"{layer}{part}", index), rows)

    def _read(self, tensor: str, rows: slice | tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        file, stored = self._placed[tensor]
        return file.read(stored, rows)


def _is_behind(name: str, num_layers: int) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers


def names_of(config: ModelConfig, shapes: Iterable[str] = ()) -> TensorNames:
    """Where the weights of a model are, in a checkpoint of tensors with these names. Mixtral's experts have names of their own;
    experts as transformers 5 has them in memory are stacked."""
    layer_names = dict[str, str | StoredExperts]()
    if config.post_norms:
        layer_names |= _POST_NORMS
    if config.experts is not None and config.experts.scale is not None:
        layer_names |= _CORRECTED_NAMES
    if config.experts is not None and config.experts.biased:
        layer_names |= _BIASED_NAMES
    elif any(".block_sparse_moe." in name for name in shapes):
        layer_names |= _MIXTRAL_NAMES
    elif any(name.endswith(".mlp.experts.down_proj") for name in shapes):
        layer_names |= _STACKED_NAMES
    names, shared = _NAMES[config.family].with_layer(layer_names), ("k_proj", "v_proj", "k_norm", "v_norm")
    of_layers = (f"model.layers.{i}.self_attn." for i, kind in enumerate(config.kinds) if kind.kv_from is not None)
    unread = tuple(
        f"{layer}{name}.weight" for layer in of_layers for name in shared
    )  # of layers that read others' keys
    return replace(names, ignored=names.ignored + unread)


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


def read_config(directory: Path, *, draft_layer: bool = False) -> ModelConfig:
    """The config in a directory, without its weights, with the layer that drafts if that is wanted. Raises `ModelError` if it
    is missing or not supported."""
    config_file, generation_file = directory / "config.json", directory / "generation_config.json"
    _refuse_adapter(directory / "adapter_config.json")
    if not config_file.is_file():
        files = sorted(file.name for file in directory.glob("*.gguf"))
        fix = f"name its file {files[0]}" if files else "name a Hugging Face directory"
        raise ModelError("the model's directory has no config.json", got=directory, fix=fix)
    generation = read_json(generation_file) if generation_file.is_file() else None
    parsed = read_json(config_file)
    config = config_from_hf(parsed, generation)
    return with_draft_layer(config, parsed) if draft_layer else config


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
