"""Compares a fresh set of golden files with the committed one: see `golden.py`."""

import json
from pathlib import Path

import numpy as np
import torch
from golden_text import TIE_MARGIN
from safetensors.torch import load_file


def compare(fresh: Path, committed: Path) -> list[str]:
    """One sentence for each file of either folder that is missing or differs by more than float32 noise."""
    files = [(root, path) for root in (fresh, committed) for path in root.rglob("*") if path.is_file()]
    names = sorted({str(path.relative_to(root)) for root, path in files} - {"README.md"})
    checks = {
        ".model": same_bytes,
        ".npz": same_arrays,
        ".safetensors": same_tensors,
        ".bin": same_tensors,
        ".json": same_json,
    }
    differences = []
    for name in names:
        ours, theirs = fresh / name, committed / name
        if not (ours.exists() and theirs.exists()):
            differences.append(f"{name}: only {'made now' if ours.exists() else 'committed'}")
        elif not checks[ours.suffix](ours, theirs):
            differences.append(f"{name}: differs")
    return differences


def same_bytes(ours: Path, theirs: Path) -> bool:
    return ours.read_bytes() == theirs.read_bytes()


def same_arrays(ours: Path, theirs: Path) -> bool:
    a, b = np.load(ours), np.load(theirs)
    return set(a) == set(b) and all(np.allclose(a[key], b[key], atol=1e-4) for key in a)


def same_tensors(ours: Path, theirs: Path) -> bool:
    load = torch.load if ours.suffix == ".bin" else load_file
    a, b = load(ours), load(theirs)
    return set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a)


def same_json(ours: Path, theirs: Path) -> bool:
    a, b = json.loads(ours.read_text()), json.loads(theirs.read_text())
    if "dynamic" in a and "dynamic" in b:
        return a.keys() == b.keys() and all(same_variant(a[name], b[name]) for name in a)
    if "runs" in a and "runs" in b:
        return len(a["runs"]) == len(b["runs"]) and all(map(same_run, a["runs"], b["runs"]))
    return a == b


def same_variant(ours: dict, theirs: dict) -> bool:
    logits = [variant.pop("logits") for variant in (ours, theirs)]
    ropes = [[*rope["frequencies"], rope["attention_factor"]] for rope in (ours.pop("rope"), theirs.pop("rope"))]
    return ours == theirs and np.allclose(*logits, atol=1e-4) and np.allclose(*ropes, rtol=1e-5)


def same_run(ours: dict, theirs: dict) -> bool:
    """Equal up to the first near tie."""
    if ours["prompt_ids"] != theirs["prompt_ids"]:
        return False
    steps = zip(ours["tokens"], theirs["tokens"], theirs["margins"], strict=True)
    first = next((margin for a, b, margin in steps if a != b), 0.0)
    return first < TIE_MARGIN
