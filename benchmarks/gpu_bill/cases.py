"""What the bill compiles: models, buckets and ways of multiplying. Imports no JAX at run time of the command."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.suite.models import GPTJ_6B, LLAMA_3_8B
from jinfercept.models.config import ExpertsConfig, LayerKind, ModelConfig, RopeConfig


def gemma4_kinds(num_kv_heads: int) -> tuple[LayerKind, ...]:
    """Five layers with a window, which have so many KV heads of 256 numbers, and one without."""
    rope = RopeConfig(theta=10_000.0, rotary_dim=256)
    near = LayerKind(window=1024, rope=rope, head_dim=256, num_kv_heads=num_kv_heads)
    return *(near,) * 5, LayerKind(keys_are_values=True)


QWEN3_8B = replace(
    LLAMA_3_8B,
    vocab_size=151_936,
    num_layers=36,
    ffn_size=12_288,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0, rotary_dim=128),
    max_position=40_960,
    qk_norm=True,
)
QWEN3_30B_A3B = replace(
    QWEN3_8B,
    hidden_size=2048,
    num_layers=48,
    num_kv_heads=4,
    ffn_size=6144,
    experts=ExpertsConfig(num_experts=128, per_token=8, ffn_size=768, normalised=True),
)
LLAMA_3_70B = replace(LLAMA_3_8B, hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28_672)
GEMMA_4_31B = ModelConfig(
    family="gemma4",
    vocab_size=262_144,
    hidden_size=5376,
    num_layers=60,
    num_heads=32,
    num_kv_heads=4,
    head_dim=512,
    ffn_size=21_504,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0, rotary_dim=512, scaling="proportional", turning_pairs=64),
    tie_embeddings=True,
    max_position=262_144,
    eos_token_ids=(),
    activation="gelu_new",
    qk_norm=True,
    post_norms=True,
    kinds=gemma4_kinds(num_kv_heads=16) * 10,
    logit_cap=30.0,
)
GEMMA_4_26B_A4B = replace(
    GEMMA_4_31B,
    hidden_size=2816,
    num_layers=30,
    num_heads=16,
    num_kv_heads=2,
    ffn_size=2112,
    kinds=gemma4_kinds(num_kv_heads=8) * 5,
    experts=ExpertsConfig(num_experts=128, per_token=8, ffn_size=704, normalised=True, activation="gelu_new"),
)
MODELS: dict[str, ModelConfig] = {"llama-3-8b": LLAMA_3_8B, "gpt-j-6b": GPTJ_6B, "qwen3-8b": QWEN3_8B}
CUT_MODELS: dict[str, ModelConfig] = {"llama-3-70b": LLAMA_3_70B}
"""Models that one GPU does not hold."""
EXPERT_MODELS: dict[str, ModelConfig] = {"qwen3-30b-a3b": QWEN3_30B_A3B}
"""Models whose steps read the experts in use."""
KIND_MODELS: dict[str, ModelConfig] = {"gemma-4-31b": GEMMA_4_31B, "gemma-4-26b-a4b": GEMMA_4_26B_A4B}
"""Models with layers of several kinds, which are compiled when they are named."""
GPUS = ("h100", "a100")
ROWS = (1, 8, 64, 256, 512)
DEFAULT_ROWS = {"llama-3-8b": ROWS, "gpt-j-6b": (1, 64), "qwen3-8b": (1, 64)}
EXPERT_ROWS = KIND_ROWS = (1, 64)
TRITON_ROWS = (1, 64, 256)
"""Rows of Llama-3-8B that the default set compiles with Triton products too."""
CUT_AMONG = (("h100", 4), ("a100", 8))
"""GPUs, and how many of them, that share a model of `CUT_MODELS`."""
NUM_LAYERS = 2
"""Of the executables of layers, where all layers are alike. One more layer adds what one adds here, but what a group shares is
shared by more in an engine."""
NUM_PAGES, PAGE_SIZE, MAX_MODEL_LEN = 6000, 16, 8192
LONG_MODEL_LEN = 131_072
"""Tokens per sequence of the long cases, of which an H100 holds the KV of two or three beside Llama-3-8B."""


class StepSize(NamedTuple):
    """A predicted step.

    Attributes:
        rows: sequences that decode.
        context: tokens of each.
        chunk: tokens of one more sequence, the first of its prompt; 0: there is none.
    """

    rows: int
    context: int
    chunk: int = 0

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.rows + self.chunk

    @property
    def sequences(self) -> int:
        """Rows that are sampled."""
        return self.rows + bool(self.chunk)


MIXED = StepSize(64, 512, chunk=448)
STEPS = (
    *(StepSize(rows, 1000) for rows in ROWS),
    StepSize(48, 8000),
    StepSize(1, 131_000),
    StepSize(2, 131_000),
    MIXED,
)


class Case(NamedTuple):
    """Executables of one bucket.

    Attributes:
        bucket: query tokens.
        max_num_seqs: sequence slots, which bound the rows that are sampled.
        triton_products: whether XLA may multiply by Triton kernels (`xla_gpu_enable_triton_gemm`), or by cuBLAS alone.
        transfers: whether the model's transfers are compiled too; once is enough.
        num_devices: GPUs of one machine that cut weights and pages.
        max_model_len: tokens per sequence, which the page tables have room for.
    """

    gpu: str
    model: str
    bucket: int
    max_num_seqs: int
    triton_products: bool = False
    transfers: bool = False
    num_devices: int = 1
    max_model_len: int = MAX_MODEL_LEN

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return (MODELS | CUT_MODELS | EXPERT_MODELS | KIND_MODELS)[self.model]

    @property
    def num_layers(self) -> int:
        """Layers of its executables: where they differ, the first ones up to a layer without a window."""
        windows = [kind.window for kind in self.config.kinds]
        return windows.index(None) + 1 if windows else NUM_LAYERS

    def takes(self, context: int) -> bool:
        """Whether steps with so many tokens of context a row are predicted by these executables."""
        return (context > MAX_MODEL_LEN) == (self.max_model_len > MAX_MODEL_LEN)

    def compiles(self, kind: str) -> bool:
        """Whether executables of a kind are compiled: without products they are the same for both ways of multiplying."""
        return not self.triton_products or kind.split()[-1] in ("layers", "head")

    @property
    def expert_bytes(self) -> tuple[int, int]:
        """Of the stacks of a layer's experts in bfloat16: of gates and inputs, and of outputs. Zeros without experts."""
        if (experts := self.config.experts) is None:
            return 0, 0
        size = 2 * experts.num_experts * self.config.hidden_size * experts.ffn_size
        return 2 * size, size

    def idle_share(self, rows: int) -> float:
        """The expected part of the experts that compute none of so many rows."""
        experts = self.config.experts
        return 0.0 if experts is None else (1 - experts.per_token / experts.num_experts) ** rows

    @property
    def library(self) -> str:
        """What multiplies."""
        return "Triton" if self.triton_products else "cuBLAS"


def default_cases() -> list[Case]:
    """A few minutes on two cores: Llama-3-8B on an H100 in all rows, the others in some; Llama-3-70B on several GPUs."""
    cases = [case for model, rows in DEFAULT_ROWS.items() for case in _of("h100", model, rows, False)]
    cases += _of("h100", "llama-3-8b", TRITON_ROWS, True)
    return [
        *cases,
        long_case(),
        mixed_case(),
        *_cut(),
        *_with_experts(),
        *_of("a100", "llama-3-8b", (1, 64, 256), False),
    ]


def full_cases() -> list[Case]:
    """Every model, number of rows, GPU and way of multiplying; Llama-3-70B and experts as in the default set."""
    return [long_case(), mixed_case(), *_cut(), *_with_experts()] + [
        case for gpu in GPUS for model in MODELS for triton in (False, True) for case in _of(gpu, model, ROWS, triton)
    ]


def sample_case() -> Case:
    """What a test checks: one bucket of Llama-3-8B on an H100."""
    return Case("h100", "llama-3-8b", 64, 64, transfers=True)


def long_case() -> Case:
    """Contexts of agents: a few rows of Llama-3-8B on an H100, in the bucket of an engine's defaults."""
    return Case("h100", "llama-3-8b", 8, 8, max_model_len=LONG_MODEL_LEN)


def mixed_case() -> Case:
    """Decode rows of Llama-3-8B beside a chunk on an H100."""
    return Case("h100", "llama-3-8b", MIXED.tokens, MIXED.sequences)


def kind_cases(model: str) -> list[Case]:
    """A model of `KIND_MODELS` on an H100."""
    return _of("h100", model, KIND_ROWS, False)


def with_default_buckets(cases: Sequence[Case], buckets: Iterable[int]) -> list[Case]:
    """The cases, and those of the buckets by which an engine with its defaults would serve the same rows."""
    buckets = sorted(buckets)
    served = list(cases)
    for case in cases:
        bucket = next((size for size in buckets if size >= case.bucket), case.bucket)
        served.append(case._replace(bucket=bucket, transfers=False))
    return list(dict.fromkeys(case for case in served if case.transfers or case._replace(transfers=True) not in served))


def _cut() -> list[Case]:
    return [Case(gpu, "llama-3-70b", 64, 64, transfers=True, num_devices=count) for gpu, count in CUT_AMONG]


def _with_experts() -> list[Case]:
    return [case for model in EXPERT_MODELS for case in _of("h100", model, EXPERT_ROWS, False)]


def _of(gpu: str, model: str, rows: Sequence[int], triton: bool) -> list[Case]:
    return [Case(gpu, model, size, size, triton, size == rows[0] and not triton) for size in rows]
