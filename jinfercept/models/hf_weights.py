"""Hugging Face checkpoints: a directory with `config.json` and one or several files of weights.

The files are `.safetensors`, or torch's `pytorch_model*.bin` of older models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import StoredTensor, TensorNames
from jinfercept.models.config import Family, ModelConfig
from jinfercept.models.fp8_weights import Float8Format
from jinfercept.models.gptq_weights import WordFormat
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.packed_rows import PackedRows, Packing
from jinfercept.models.safetensors_weights import SafetensorsFile
from jinfercept.models.torch_weights import TorchFile

_MAX_JSON_BYTES = 64 << 20  # an index of a hundred thousand tensors has 10 MB

_NAMES: dict[Family, TensorNames] = {
    "llama": TensorNames(
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
            "ffn_norm": StoredTensor("model.layers.{i}.post_attention_layernorm.weight"),
            "gate": StoredTensor("model.layers.{i}.mlp.gate_proj.weight", inputs=1),
            "up": StoredTensor("model.layers.{i}.mlp.up_proj.weight", inputs=1),
            "down": StoredTensor("model.layers.{i}.mlp.down_proj.weight", inputs=1),
        },
        head={"norm": StoredTensor("model.norm.weight"), "unembed": StoredTensor("lm_head.weight")},
        ignored=(".rotary_emb.inv_freq",),
    ),
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


@dataclass(frozen=True)
class HFCheckpoint:
    """A directory's config and the headers of its weight files."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    _files: Mapping[str, SafetensorsFile | TorchFile]
    _words: WordFormat | Float8Format | None

    @classmethod
    def open(cls, directory: Path) -> "HFCheckpoint":
        """Read the config and the headers; a directory without weights has no shapes.

        Raises:
            ModelError: `config.json` is missing or not supported, or a file cannot be read.
        """
        config, words = read_config(directory), _word_format(_json(directory / "config.json"))
        files = [SafetensorsFile.open(file) for file in _weight_files(directory, "model", "safetensors")]
        files = files or [TorchFile.open(file) for file in _weight_files(directory, "pytorch_model", "bin")]
        shapes, holders = {}, {}
        for file in files:
            shapes |= file.shapes
            holders |= dict.fromkeys(file.shapes, file)
        return cls(config, shapes if words is None else words.shapes(shapes), holders, words)

    @property
    def names(self) -> TensorNames:
        return _NAMES[self.config.family]

    @property
    def quantization(self) -> str | None:
        """See `PackedCheckpoint`."""
        return None if self._words is None else self._words.method

    def packing(self, name: str) -> Packing | None:
        """See `PackedCheckpoint`. Where the weights are not there, of layers whose names say that they are quantised."""
        if self._words is None or not _is_linear(name) or any(part in name for part in self._words.unquantised):
            return None
        inputs = self.shapes[name][1] if name in self.shapes else self._words.group_size
        return None if inputs is None else self._words.packing(inputs)

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        packing = self.packing(name)
        if packing is None:
            return self._files[name].read(name, rows)
        return self.read_packed(name, rows).dense(packing.zero)

    def read_packed(self, name: str, rows: slice) -> PackedRows:
        """See `PackedCheckpoint`."""
        assert self._words is not None

        def read(part: str, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
            stored = f"{name.removesuffix('weight')}{part}"
            return self._files[stored].read(stored, index)

        return self._words.rows(read, slice(*rows.indices(self.shapes[name][0])[:2]))


def _word_format(config: Mapping[str, Any]) -> WordFormat | Float8Format | None:
    """How linear layers are quantised, by `config.json`; None: they are not. Raises `ModelError` for other quantisations."""
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError("quantization_config is an object", got=repr(stated)[:80], fix="correct config.json")
    match stated.get("quant_method"):
        case "gptq" | "awq":
            return WordFormat.from_config(stated)
        case "fp8" | "compressed-tensors":
            return Float8Format.from_config(stated)
        case other:
            raise ModelError(
                "the checkpoint's quantisation is not supported",
                got=repr(other)[:80],
                fix="use a checkpoint of gptq, awq or fp8, a GGUF file, or one that is not quantised",
            )


def _is_linear(name: str) -> bool:
    """Whether a stored weight is that of a layer's linear part."""
    inside = ".layers." in name or ".h." in name
    return inside and name.endswith(".weight") and "norm" not in name and ".ln_" not in name


def read_config(directory: Path) -> ModelConfig:
    """The config in a directory, without its weights. Raises `ModelError` if it is missing or not supported."""
    config_file, generation_file = directory / "config.json", directory / "generation_config.json"
    if not config_file.is_file():
        raise ModelError("the model's directory has no config.json", got=directory, fix="name a Hugging Face directory")
    generation = _json(generation_file) if generation_file.is_file() else None
    return config_from_hf(_json(config_file), generation)


def _weight_files(directory: Path, stem: str, suffix: str) -> list[Path]:
    """The weight files: those that the index names, since a directory may have the same weights twice; without an index,
    all."""
    index = directory / f"{stem}.{suffix}.index.json"
    if not index.is_file():
        pattern = "*.safetensors" if suffix == "safetensors" else f"{stem}*.{suffix}"  # others' .bin are no weights
        return sorted(directory.glob(pattern))
    files = [directory / name for name in _named(index)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            "the model's index names files that are not there", got=", ".join(missing), fix="download them"
        )
    return files


def _named(index: Path) -> list[str]:
    """The file names in an index."""
    parsed = _json(index)
    placed = parsed.get("weight_map", {}) if isinstance(parsed, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ModelError(f"{index.name} has no weight_map", got=repr(parsed)[:80], fix="download it again")
    names = sorted(set(placed.values()))
    strangers = [name for name in names if Path(name).name != name or name == ".." or "\\" in name]
    if strangers:
        raise ModelError(
            "the model's index names files outside its directory",
            got=", ".join(strangers)[:200],
            fix="download the model again from somebody you trust",
        )
    return names


def _json(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > _MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file.name} is not valid JSON", got=str(error)[:200], fix="download it again") from error
