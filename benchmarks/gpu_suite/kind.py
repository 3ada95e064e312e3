"""The suite of GPUs: how large everything is that it measures, and what `nvidia-smi` says of a GPU. Imports no JAX."""

from benchmarks.gpu_suite.parts import JOBS, missing
from benchmarks.suite.kind import SuiteKind, printed
from benchmarks.suite.models import (
    GPTJ_6B,
    LLAMA_3_8B,
    SMALL_GEMMA2,
    SMALL_GPT_OSS,
    SMALL_GPTJ,
    SMALL_LLAMA,
    SMALL_QWEN3_NEXT,
)
from benchmarks.suite.sizes import (
    GIB,
    Agents,
    AttentionCase,
    Checked,
    ExpertsCase,
    HeadSizes,
    Policies,
    Row,
    Sizes,
    TransferWay,
)

LLAMA_HEADS = HeadSizes("llama-3-8b", 32, 8, 128)
GEMMA_HEADS = HeadSizes("gemma-3-1b", 4, 1, 256)

FULL = Sizes(
    models={"llama-3-8b": LLAMA_3_8B, "gpt-j-6b": GPTJ_6B},
    dtype="bfloat16",
    page_size=16,
    enough_s=0.05,
    turn_steps=30,
    copy_bytes=GIB,
    matmul_size=8192,
    link_bytes=GIB,
    calls=8,
    attention=(
        *(AttentionCase(LLAMA_HEADS, *case) for case in ((1, 2048, 65_536), (64, 1, 2048), (1, 2048, 2048))),
        *(AttentionCase(LLAMA_HEADS, *case) for case in ((1, 512, 4096), (256, 1, 1024), (32, 1, 8192), (1, 1, 1024))),
        *(AttentionCase(GEMMA_HEADS, *case, window=512) for case in ((16, 1, 8192), (1, 512, 4096))),
    ),
    attention_pool_bytes=9 * 10**9,
    product=(4096, 14336),
    product_tokens=(64, 1, 16, 256),
    experts=(
        ExpertsCase("gpt-oss-20b", 32, 4, 2880, 5760, (1, 16, 64, 512, 2048)),
        ExpertsCase("qwen3-30b-a3b", 128, 8, 2048, 1536, (1, 64, 2048)),
    ),
    start={},
    checked=(
        Checked((32, 8, 128), 16, ("bfloat16", "float32"), quantised=("int8", "fp8")),
        Checked((16, 16, 256), 16, quantised=("int8",)),
        Checked((12, 12, 64), 16),
        Checked((8, 2, 96), 16),
        Checked((32, 8, 128), 64),
        Checked((28, 4, 128), 16),
        Checked((40, 8, 128), 8),
        Checked((64, 4, 128), 32),
        Checked((8, 4, 256), 16, window=96, soft_cap=5.0),
        Checked((64, 8, 64), 16, window=128, with_sinks=True),
    ),
    checked_models={"llama": SMALL_LLAMA, "gptj": SMALL_GPTJ},
    checked_kinds={"gemma2": SMALL_GEMMA2, "gpt-oss": SMALL_GPT_OSS, "qwen3-next": SMALL_QWEN3_NEXT},
    decodes=((64, 1000), (1, 1000), (256, 1000)),
    mixed=(64, 512, 448),
    deep=(2048, 65_536),
    pool_tokens=280_000,
    layers_per_step=(32, 4, 8),
    overlap_ways=(TransferWay(128), TransferWay(16)),
    overlap_shares=(1.0, 0.5),
    transfer_pages=512,
    transfer_rows=(64, 1000),
    traced_steps=8,
    idle_steps=20,
    policies=Policies("gpt-j-6b", 4.0, 50.0, 0.3, 0.2, 8_000, 32_000, 64, 512),
    agents=Agents("llama-3-8b", 16, 25.0, 95.0, 0.4, 0.1, 65_536, 100_000, 100_000, 32, 2048),
)


PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "triton")
QUERIES = {
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "temperature": "temperature.gpu",
    "power": "power.draw",
}


def gpu_state() -> Row | None:
    """Name, driver, clocks and temperature of the first GPU as they are now; None without `nvidia-smi`."""
    query = f"--query-gpu={','.join(QUERIES.values())}"
    line = printed("nvidia-smi", query, "--format=csv,noheader", "--id=0")
    return None if line is None else dict(zip(QUERIES, map(str.strip, line.split(",")), strict=False))


GPU = SuiteKind(
    name="gpu",
    device="GPU",
    platform="cuda",
    install="install it for CUDA",
    jobs=JOBS,
    full=lambda: FULL,
    limit_s=540.0,
    missing=missing,
    state=gpu_state,
    packages=PACKAGES,
    tunes=True,
)
