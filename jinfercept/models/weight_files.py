"""The weight files of a Hugging Face directory: which of them count, as in transformers, and which file has which tensor.

`model.safetensors` counts before the files of `model.safetensors.index.json`, these before `pytorch_model.bin`, and that before
the files of its index. Without any of them all `.safetensors` count, or all `pytorch_model*.bin`; Mistral's own
`consolidated*.safetensors`, beside the converted ones, never do. No name may be in two files that count, nor in another
`.safetensors` beside `model.safetensors`: which of the two is meant cannot be known.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.model_directory import read_json
from jinfercept.models.torch_weights import TorchFile

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}
"""Names that numpy has for them."""


@dataclass(frozen=True)
class SafetensorsFile:
    """An opened file: its tensors' shapes and types."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        """Read the header. Raises `ModelError` if it is damaged."""
        try:
            with safe_open(path, framework="numpy") as tensors:
                names = tensors.keys()
                slices = {name: tensors.get_slice(name) for name in names}
                shapes = {name: tuple(stored.get_shape()) for name, stored in slices.items()}
                dtypes = {name: str(stored.get_dtype()) for name, stored in slices.items()}
                return cls(path, shapes, {name: _DTYPES.get(dtype, dtype) for name, dtype in dtypes.items()})
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelError(
                f"{path.name} is not a readable safetensors file", got=str(error)[:200], fix="download it again"
            ) from error
        except MemoryError as error:
            raise _too_large(path, error) from error

    def read(self, name: str, rows: slice | tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        try:
            with safe_open(self.path, framework="numpy") as tensors:
                if self.shapes[name] and self.dtypes[name] == "float8_e4m3fn":
                    return self._float8(name)[rows]
                return tensors.get_slice(name)[rows] if self.shapes[name] and rows != () else tensors.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:  # dtypes that numpy lacks
            raise ModelError(
                f"{name} of {self.path.name} cannot be read", got=str(error)[:200], fix="use a float32 or bfloat16 file"
            ) from error
        except MemoryError as error:
            raise _too_large(self.path, error) from error

    def _float8(self, name: str) -> Shaped[np.ndarray, "..."]:
        # the package does not read e4m3 for numpy; a file begins with the length of its header
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            first, _ = json.loads(file.read(length))[name]["data_offsets"]
        return np.memmap(self.path, ml_dtypes.float8_e4m3fn, "r", 8 + length + first, self.shapes[name])


def _too_large(path: Path, error: MemoryError) -> ModelError:
    # a file is mapped as a whole, without reading it: a process whose addresses are limited may have no room
    got = f"{path.stat().st_size} bytes: {error}"[:200]
    return ModelError(
        f"{path.name} is larger than the memory that this process may have", got=got, fix="use a smaller file"
    )


_FOREIGN = ("consolidated", "adapter_")
"""How files of weights begin that are no part of a Hugging Face model."""


_DRAFT = "mtp."
"""How names of the layer that drafts begin."""
_UNUSED = (_DRAFT, "model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
_UNUSED += ("model.embed_vision.", "model.vision_embedder.", "model.audio_tower.", "model.embed_audio.")
"""Beginnings of names: the layer that drafts, and the parts that read images or sound."""
_TEXT = {
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.model.": "model.",  # as transformers 4 has it in memory
    "model.backbone.": "model.",  # of Nemotron-H, behind `plain_names`
    "backbone.": "model.",
}
"""Beginnings of names of the part that reads text, and what they are in a model of text alone."""
_BLOCK = re.compile(r"^model(?:\.layers\.\d+)?\.\w+")


class Placed(NamedTuple):
    """Where a tensor is, and its name there."""

    file: SafetensorsFile | TorchFile
    name: str


def placed_tensors(directory: Path, base: str, *, partly: bool) -> dict[str, Placed]:
    """The tensors of the files that count, by the names that transformers has for them; empty if there is no such file.

    Names begin with `base`, as `model.`. If `partly`, all files of an index may be missing, as before a download. Raises
    `ModelError` if a file is missing or cannot be read, or two tensors have the same name.
    """
    files = _files(directory, partly)
    plain = plain_names((name for file in files for name in file.shapes), base)
    placed: dict[str, Placed] = {}
    for file in files:
        for name in file.shapes:
            _refuse_second(placed.get(plain[name]), file.path, name)
            placed[plain[name]] = Placed(file, name)
    if [file.path.name for file in files] == ["model.safetensors"]:
        by_name = {tensor.name: tensor for tensor in placed.values()}
        for path, name in _names_beside(directory):
            _refuse_second(by_name.get(name), path, name)
    return placed


def plain_names(stored: Iterable[str], base: str) -> dict[str, str]:
    """The names that transformers has for tensors, by those under which they are stored.

    Wrappers' parts of names are left out: `_orig_mod.` of `torch.compile`, `module.` of data parallelism. Where no name begins
    with `base`, it is put in front of all but those of the head and of the layer that drafts: such a checkpoint was saved
    without its head.
    """
    plain = {name: name.removeprefix("module.").replace("_orig_mod.", "") for name in stored}
    if any(name.startswith(base) for name in plain.values()):
        return plain
    return {name: new if new.startswith(("lm_head.", _DRAFT)) else base + new for name, new in plain.items()}


def text_tensors[T](tensors: Mapping[str, T], config: ModelConfig) -> dict[str, T]:
    """The tensors of a model's part that reads text, by their names in a model of text alone. The layer that drafts has the
    names of the last layer if the config has it, and is left out if not."""
    plain = {text_name(name, config): tensor for name, tensor in tensors.items()}
    if config.num_draft_layers:
        layer = f"model.layers.{config.num_layers - 1}."
        plain = {_draft_name(name, layer): tensor for name, tensor in plain.items()}
    return {name: tensor for name, tensor in plain.items() if not name.startswith(_UNUSED)}


def text_name(name: str, config: ModelConfig) -> str:
    """The name that a tensor of a model's part that reads text has in a model of text alone, and a tensor of Nemotron-H's
    layers, which have one part each, in Llama's; other names are as they are."""
    inner = next((inner for inner in _TEXT if name.startswith(inner)), "")
    plain = _TEXT.get(inner, "") + name.removeprefix(inner)
    return _BLOCK.sub(lambda block: _part_names(config.kinds).get(block[0], block[0]), plain)


@cache
def _part_names(kinds: tuple[LayerKind, ...]) -> dict[str, str]:
    """Beginnings of names in Nemotron-H, and those of the same weights in Llama's layers: its own have one part each."""
    names, number = {"model.embeddings": "model.embed_tokens", "model.norm_f": "model.norm"}, count()
    for layer, kind in enumerate(kinds):
        mixer = "linear_attn" if kind.is_recurrent else "self_attn"
        parts = (("input_layernorm", mixer), ("post_attention_layernorm", "mlp"))
        for norm, part in parts[not kind.has_mixer : 1 + kind.has_ffn]:
            theirs, ours = f"model.layers.{next(number)}.", f"model.layers.{layer}."
            names |= {f"{theirs}norm": ours + norm, f"{theirs}mixer": ours + part}
    return names


def _draft_name(name: str, layer: str) -> str:
    inner = f"{_DRAFT}layers.0."
    if name.startswith(inner):
        return layer + name.removeprefix(inner)
    return layer + name if name.startswith(_DRAFT) else name


def _refuse_second(first: Placed | None, path: Path, name: str) -> None:
    if first is not None:
        raise ModelError(
            "two weights of the model have the same name",
            got=f"{first.name[:200]} of {first.file.path.name} and {name[:200]} of {path.name}",
            fix="move the file that is not meant out of the directory",
        )


def _files(directory: Path, partly: bool) -> list[SafetensorsFile] | list[TorchFile]:
    if paths := _paths(directory, "model", "safetensors", "*.safetensors", partly):
        return [SafetensorsFile.open(path) for path in paths]
    paths = _paths(directory, "pytorch_model", "bin", "pytorch_model*.bin", partly)  # others' .bin are no weights
    return [TorchFile.open(path) for path in paths]


def _paths(directory: Path, stem: str, suffix: str, pattern: str, partly: bool) -> list[Path]:
    single, index = directory / f"{stem}.{suffix}", directory / f"{stem}.{suffix}.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(path for path in directory.glob(pattern) if not path.name.startswith(_FOREIGN))
    files = [directory / name for name in _named(index)]
    missing = [file.name for file in files if not file.is_file()]
    if partly and len(missing) == len(files):
        return []
    if missing:
        raise ModelError(
            "the model's index names files that are not there", got=", ".join(missing)[:500], fix="download them"
        )
    return files


def _names_beside(directory: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(directory.glob("*.safetensors")):
        if path.name != "model.safetensors" and not path.name.startswith(_FOREIGN):
            try:
                yield from ((path, name) for name in SafetensorsFile.open(path).shapes)
            except ModelError:  # it is not used
                continue


def _named(index: Path) -> list[str]:
    parsed = read_json(index)
    placed = parsed.get("weight_map", {}) if isinstance(parsed, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ModelError(f"{index.name} has no weight_map", got=shown(parsed), fix="download it again")
    names = sorted(set(placed.values()))
    strangers = [name for name in names if Path(name).name != name or name == ".." or "\\" in name]
    if strangers:
        raise ModelError(
            "the model's index names files outside its directory",
            got=", ".join(strangers)[:200],
            fix="download the model again, from a publisher you trust",
        )
    return names
