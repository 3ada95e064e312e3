"""The suite of TPUs: how large everything is that it measures, by the memory of a chip, and what a machine's variables say of
one.

Imports no JAX. No TPU has run the suite.
"""

import os
from dataclasses import replace

from benchmarks.gpu_suite.kind import FULL as ON_GPU
from benchmarks.gpu_suite.kind import GEMMA_HEADS, LLAMA_HEADS
from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.models import LLAMA_3_2_3B, LLAMA_3_8B, SMALL_GEMMA2, SMALL_LLAMA, SMALL_QWEN3_NEXT
from benchmarks.suite.sizes import GIB, TINY, AttentionCase, Checked, ExpertsCase, Policies, Row, Sizes, TransferWay
from benchmarks.tpu_suite.parts import JOBS, missing

LEAST_BYTES = 24 * GIB
"""Of a device's memory in which Llama-3-8B has room for contexts; a v5e has 16."""

LARGE = replace(
    ON_GPU,
    models={"llama-3-8b": LLAMA_3_8B},
    attention=(
        *(AttentionCase(LLAMA_HEADS, *case) for case in ((64, 1, 2048), (256, 1, 1024), (32, 1, 8192), (1, 1, 1024))),
        *(AttentionCase(LLAMA_HEADS, *case) for case in ((1, 2048, 2048), (1, 512, 4096), (4, 512, 2048))),
        *(AttentionCase(GEMMA_HEADS, *case, window=512) for case in ((16, 1, 8192), (1, 512, 4096))),
    ),
    attention_pool_bytes=6 * 10**9,
    experts=(ExpertsCase("qwen3-30b-a3b", 128, 8, 2048, 1536, (1, 64, 2048)),),
    checked=(
        Checked((32, 8, 128), 16),
        Checked((12, 12, 64), 16),
        Checked((8, 2, 96), 16),
        Checked((32, 8, 128), 64),
        Checked((4, 1, 256), 16, window=96, soft_cap=5.0),
    ),
    checked_models={"llama": SMALL_LLAMA},
    checked_kinds={"gemma2": SMALL_GEMMA2, "qwen3-next": SMALL_QWEN3_NEXT},
    policies=Policies("llama-3-8b", 4.0, 50.0, 0.3, 0.2, 8_000, 32_000, 64, 512),
    interleaved=True,
)
SMALL = replace(
    LARGE,
    models={"llama-3.2-3b": LLAMA_3_2_3B},
    copy_bytes=GIB // 2,
    attention_pool_bytes=3 * 10**9,
    pool_tokens=70_000,
    layers_per_step=(4, 28, 7),
    transfer_pages=256,
    overlap_ways=(TransferWay(64), TransferWay(16)),
    policies=LARGE.policies._replace(model="llama-3.2-3b"),
    agents=LARGE.agents._replace(
        model="llama-3.2-3b", scale_tokens=0.1, max_model_len=28_000, kv_tokens=30_000, host_tokens=30_000
    ),
)
ON_CPU = replace(
    TINY,
    checked=tuple(shape._replace(quantised=()) for shape in TINY.checked),  # pages of TPUs have no scales
    interleaved=True,
)


def full() -> Sizes:
    """Sizes that fit this machine's first TPU. Starts JAX's backend."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return LARGE if stats.get("bytes_limit", 0) >= LEAST_BYTES else SMALL


VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_WORKER_ID", "TPU_CHIPS_PER_HOST_BOUNDS", "LIBTPU_INIT_ARGS")


def tpu_state() -> Row | None:
    """The variables of the environment that describe the TPU; None without any."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ} or None


TPU = SuiteKind(
    name="tpu",
    device="TPU",
    platform="tpu",
    install="pip install 'jinfercept[tpu]' on a machine that has one",
    jobs=JOBS,
    full=full,
    limit_s=7200.0,
    missing=missing,
    state=tpu_state,
    packages=("libtpu",),
    tiny=ON_CPU,
)
