"""A tiny checkpoint with a layer that drafts, made of a golden one."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.tiny_model import GOLDEN

DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
_SUMMED = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Weights whose products are added to the stream."""


def with_draft_layer(name: str, folder: Path, *, agrees: bool = False) -> Path:
    """A golden checkpoint with `mtp.` weights as Qwen3-Next's are named: those of its layer with attention, and random ones.

    Args:
        folder: that has it, which must not be there.
        agrees: whether the layers add little to the vector of the token, so that the draft is often what the model writes.
    """
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    rng, width = np.random.default_rng(1), config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    like = f"model.layers.{config['layer_types'].index('full_attention')}."
    own: dict[str, np.ndarray] = {
        f"mtp.layers.0.{key.removeprefix(like)}": weight.astype(np.float32)
        * (1 + 0.1 * rng.standard_normal(weight.shape).astype(np.float32))
        for key, weight in tensors.items()
        if key.startswith(like)
    }
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    own |= {key: 0.2 * rng.standard_normal(width).astype(np.float32) for key in norms}
    own["mtp.fc.weight"] = (rng.standard_normal((width, 2 * width)) * (2 * width) ** -0.5).astype(np.float32)
    if agrees:
        own |= {key: np.zeros(width, np.float32) for key in norms}
        own["mtp.fc.weight"] = np.eye(width, 2 * width, dtype=np.float32)
        own["mtp.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
        tensors, own = (
            {
                key: (0.1 * weight).astype(weight.dtype) if key.endswith(_SUMMED) else weight
                for key, weight in of.items()
            }
            for of in (tensors, own)
        )
    save_file(tensors | own, folder / "model.safetensors")
    return folder


def with_assistant(folder: Path) -> tuple[Path, Path]:
    """A golden Gemma 4 whose layers add little to the vector of the token, and an assistant that looks at that vector alone, so
    that its drafts are often what the model writes.

    Args:
        folder: that has both.
    """
    served, assistant = folder / "served", folder / "assistant"
    shutil.copytree(GOLDEN / "gemma4", served)
    shutil.copytree(GOLDEN / "gemma4_assistant", assistant)
    tensors = load_file(served / "model.safetensors")
    small = {
        key: (0.05 * weight).astype(weight.dtype)
        for key, weight in tensors.items()
        if key.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"))
    }
    save_file(tensors | small, served / "model.safetensors")
    config = json.loads((assistant / "config.json").read_text())
    width = config["backbone_hidden_size"]
    config["text_config"] |= {"hidden_size": width}
    (assistant / "config.json").write_text(json.dumps(config))
    own = load_file(assistant / "model.safetensors")
    for key, weight in own.items():
        sizes = [width if size == 24 else size for size in weight.shape]
        own[key] = np.ones(sizes, np.float32) if key.endswith("layer_scalar") else np.zeros(sizes, np.float32)
    own |= {key: tensors[key].astype(np.float32) for key in ("model.embed_tokens.weight", "model.norm.weight")}
    own["pre_projection.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    save_file(own, assistant / "model.safetensors")
    return served, assistant
