"""One file knows which compiler a kernel for NVIDIA GPUs comes from."""

import ast
from pathlib import Path

import jinfercept
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.tiles import HOPPER

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
    assert gpu_kernels.available_attention("bfloat16", "bfloat16", 128, 16) == ["triton", "mosaic"]
    assert gpu_kernels.available_attention("bfloat16", "bfloat16", 96, 16) == ["triton"]
    assert gpu_kernels.available_attention("float32", "bfloat16", 128, 16) == []
    monkeypatch.setattr(gpu_kernels, "compute_capability", lambda: 75)
    assert gpu_kernels.available_attention("bfloat16", "bfloat16", 128, 16) == []
