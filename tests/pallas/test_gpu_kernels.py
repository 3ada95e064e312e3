"""One file knows which compiler a kernel for NVIDIA GPUs comes from."""

import ast
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

import jinfercept
from benchmarks.suite.models import SMALL_GEMMA2, SMALL_GPT_OSS, SMALL_LLAMA
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.model import Model
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.tiles import HOPPER
from jinfercept.runner import steps
from jinfercept.runner.shape import RunnerShape

PACKAGE = Path(jinfercept.__file__).parent
KERNELS = PACKAGE / "pallas"
COMPILERS = {"triton": "jax.experimental.pallas.triton", "mosaic": "jax.experimental.pallas.mosaic_gpu"}
ASKS_FOR_THE_GPU = "gpu_heads.py"  # by Pallas' Triton, which knows the GPU that code is lowered for


def imported(source: str) -> set[str]:
    """The modules that a file imports, wherever it does."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
    return modules


def test_no_other_file_imports_kernels_or_their_compilers() -> None:
    sources = {path: source for path in PACKAGE.rglob("*.py") if "pallas" in (source := path.read_text())}
    assert KERNELS / "gpu_kernels.py" in sources
    for path, source in sources.items():
        names = imported(source)
        for compiler, module in COMPILERS.items():
            if path.parent == KERNELS and path.name.startswith(compiler):
                continue
            if path.name != ASKS_FOR_THE_GPU:
                assert module not in names, f"{path} imports {module}"
            kernels = {name for name in names if name.startswith(f"jinfercept.pallas.{compiler}_")}
            assert not kernels or path.name == "gpu_kernels.py", f"{path} imports {kernels}"


def test_the_implementations_are_listed_best_first(monkeypatch) -> None:
    monkeypatch.setattr(gpu_kernels, "compute_capability", lambda: HOPPER)
    assert gpu_kernels.available_attention("bfloat16", "bfloat16", 128, 16) == ["mosaic", "triton"]
    assert gpu_kernels.available_attention("bfloat16", "bfloat16", 96, 16) == ["triton"]
    assert gpu_kernels.available_attention("float32", "bfloat16", 128, 16) == []
    monkeypatch.setattr(gpu_kernels, "compute_capability", lambda: 75)
    assert gpu_kernels.available_attention("bfloat16", "bfloat16", 128, 16) == []


def test_the_kernel_for_plain_layers_is_chosen_where_all_layers_are_plain(monkeypatch) -> None:
    monkeypatch.setattr(steps, "available", lambda *_: ["mosaic", "triton"])
    shape = RunnerShape(num_pages=6, page_size=4, max_num_seqs=2, max_model_len=64, buckets=(4,), layers_per_step=1)

    def chosen(config: ModelConfig, attention: str = "auto", max_model_len: int = 64) -> str:
        return steps.chosen_attention(
            Model(config), replace(shape, max_model_len=max_model_len), attention, jnp.bfloat16
        )

    windows = (LayerKind(window=16),) * SMALL_LLAMA.num_layers
    assert chosen(SMALL_LLAMA) == "mosaic"
    assert chosen(SMALL_LLAMA, "triton") == "triton"
    assert chosen(replace(SMALL_LLAMA, kinds=windows)) == "auto"
    assert chosen(replace(SMALL_LLAMA, kinds=windows), max_model_len=16) == "mosaic"
    assert chosen(SMALL_GPT_OSS) == "auto"
    assert chosen(SMALL_GEMMA2) == "auto"
    monkeypatch.setattr(steps, "available", lambda *_: [])
    assert chosen(SMALL_LLAMA) == "auto"
