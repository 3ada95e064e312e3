"""Adapters as PEFT writes them, with random numbers, and checkpoints into which they are merged."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
GPTJ = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")


def matrices(base: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint."""
    return {name: value for file in sorted(base.glob("*.safetensors")) for name, value in load_file(file).items()}


def write_adapter(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    targets: Sequence[str] = ALL,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 1.0,
    **config: Any,
) -> Path:
    """A directory as `PeftModel.save_pretrained` makes it.

    Args:
        shapes: of a checkpoint's tensors by name.
        targets: last parts of the names of the modules.
        size: of what the adapter adds, about, for inputs of size 1.
        config: of `adapter_config.json`, beside the usual.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng, tensors = np.random.default_rng(seed), {}
    for name in sorted(shapes):
        module = name.removesuffix(".weight")
        if not name.endswith(tuple(f".{target}.weight" for target in targets)):
            continue
        outputs, inputs = shapes[name]
        numbers = rng.standard_normal((rank, inputs)) / math.sqrt(inputs), rng.standard_normal((outputs, rank))
        for side, values in zip("AB", numbers, strict=True):
            values = values * (size / rank if side == "B" else 1)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    stated |= {"target_modules": [*targets], "lora_dropout": 0.1, "init_lora_weights": True, "use_dora": False}
    stated |= {"modules_to_save": None, "use_rslora": False, "fan_in_fan_out": False, "rank_pattern": {}}
    (directory / "adapter_config.json").write_text(json.dumps(stated | config))
    return directory


def shapes_of(base: Path) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in matrices(base).items()}


def merged(base: Path, adapter: Path, into: Path) -> Path:
    """A checkpoint with an adapter merged into its weights, as `merge_and_unload` of PEFT does it."""
    shutil.copytree(base, into)
    tensors, factors = matrices(base), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for file in into.glob("*.safetensors*"):
        file.unlink()
    for name in factors:
        if not (match := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)):
            continue
        a, b = factors[name], factors[name.replace("lora_A", "lora_B")]
        scale = config["lora_alpha"] / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        whole = tensors[f"{match[1]}.weight"].astype(np.float32)
        tensors[f"{match[1]}.weight"] = whole + scale * (b.astype(np.float64) @ a.astype(np.float64)).astype(np.float32)
    save_file(tensors, into / "model.safetensors")
    return into
