"""One file knows which compiler a kernel for NVIDIA GPUs comes from."""

import ast
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jinfercept
from benchmarks.suite.models import SMALL_GEMMA2, SMALL_GPT_OSS, SMALL_LLAMA
from jinfercept.models import attention
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.model import Model
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.tiles import HOPPER, Heads
from jinfercept.runner.shape import RunnerShape
from jinfercept.runner.steps import step_shapes

PACKAGE = Path(jinfercept.__file__).parent
KERNELS = PACKAGE / "pallas"
COMPILERS = {"triton": "jax.experimental.pallas.triton", "mosaic": "jax.experimental.pallas.mosaic_gpu"}
ASKS_FOR_THE_GPU = "tiles.py"  # by Pallas' Triton, which knows the GPU that code is lowered for


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


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Code is chosen for an H100, and for another GPU once the test sets its compute capability."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_kernels, "compute_capability", lambda: HOPPER)
    return monkeypatch


LLAMA = Heads(32, 8, 128, 2)


@pytest.mark.parametrize(
    ("capability", "q", "pages", "heads", "page_size", "names"),
    [
        (HOPPER, "bfloat16", "bfloat16", LLAMA, 16, ["mosaic", "triton"]),
        (HOPPER, "float16", "float16", LLAMA._replace(num_heads=40, head_dim=64), 8, ["mosaic", "triton"]),
        (HOPPER, "bfloat16", "bfloat16", LLAMA._replace(head_dim=96), 16, ["triton"]),
        (HOPPER, "bfloat16", "bfloat16", LLAMA._replace(head_dim=256), 16, ["triton"]),
        (HOPPER, "bfloat16", "bfloat16", LLAMA._replace(num_heads=8 * 71), 16, ["triton"]),
        (HOPPER, "bfloat16", "bfloat16", LLAMA, 20, ["triton"]),
        (HOPPER, "bfloat16", "int32", LLAMA._replace(quantised=True), 16, ["triton"]),
        (HOPPER, "float32", "float32", LLAMA._replace(itemsize=4), 16, ["triton"]),
        (HOPPER, "float32", "bfloat16", LLAMA, 16, []),
        (80, "bfloat16", "bfloat16", LLAMA, 16, ["triton"]),
        (89, "bfloat16", "bfloat16", LLAMA, 16, ["triton"]),
        (100, "bfloat16", "bfloat16", LLAMA, 16, ["triton"]),
        (75, "bfloat16", "bfloat16", LLAMA, 16, []),
    ],
)
def test_chunks_are_mosaics_on_hopper_and_tritons_where_mosaic_refuses(
    on_gpus: pytest.MonkeyPatch, capability, q, pages, heads, page_size, names
) -> None:
    on_gpus.setattr(gpu_kernels, "compute_capability", lambda: capability)
    assert attention.available(q, pages, heads, page_size) == names
    assert attention.best(q, pages, heads, page_size, plain=True) == (names or ["reference"])[0]
    assert attention.best(q, pages, heads, page_size, plain=False) == (names or ["reference"])[-1]


WINDOW = LayerKind(window=16)


@pytest.mark.parametrize(
    ("config", "attention", "max_model_len", "name"),
    [
        (SMALL_LLAMA, "auto", 64, "mosaic"),
        (SMALL_LLAMA, "triton", 64, "triton"),
        (replace(SMALL_LLAMA, kinds=(WINDOW,) * SMALL_LLAMA.num_layers), "auto", 64, "triton"),
        (replace(SMALL_LLAMA, kinds=(WINDOW,) * SMALL_LLAMA.num_layers), "auto", 16, "mosaic"),
        (replace(SMALL_LLAMA, kinds=(WINDOW,) * (SMALL_LLAMA.num_layers - 1) + (LayerKind(),)), "auto", 64, "mosaic"),
        (SMALL_GPT_OSS, "auto", 64, "triton"),
        (SMALL_GEMMA2, "auto", 64, "triton"),
    ],
)
def test_a_model_with_a_plain_layer_takes_mosaics_chunks(
    on_gpus: pytest.MonkeyPatch, config: ModelConfig, attention: str, max_model_len: int, name: str
) -> None:
    on_gpus.setattr("jinfercept.runner.steps.cut_for", lambda *_: None)
    shape = RunnerShape(
        num_pages=6, page_size=8, max_num_seqs=2, max_model_len=max_model_len, buckets=(4,), layers_per_step=1
    )
    model, like = Model(replace(config, head_dim=64)), jnp.zeros(1, jnp.bfloat16)
    assert {bucket.attention for bucket in step_shapes(model, shape, attention, like).values()} == {name}
