"""What the bill compiles: generations of TPUs, models, buckets, and numbers of devices that cut a model. Imports no JAX at run
time of the command."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.gpu_bill.cases import LLAMA_3_70B, QWEN3_30B_A3B
from benchmarks.suite.models import LLAMA_3_8B
from jinfercept.models.config import PLAIN_KIND, LayerKind, ModelConfig, RopeConfig

GEMMA_3_12B = replace(
    LLAMA_3_8B,
    family="gemma",
    vocab_size=262_208,
    hidden_size=3840,
    num_layers=48,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    ffn_size=15_360,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0, rotary_dim=256),
    max_position=131_072,
    tie_embeddings=True,
    activation="gelu_new",
    qk_norm=True,
    post_norms=True,
    kinds=(*(LayerKind(window=1024, rope=RopeConfig(theta=10_000.0, rotary_dim=256)),) * 5, PLAIN_KIND) * 8,
)
MODELS: Mapping[str, ModelConfig] = {
    "llama-3-8b": LLAMA_3_8B,
    "gemma-3-12b": GEMMA_3_12B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "llama-3-70b": LLAMA_3_70B,
}
DEVICES = {"llama-3-8b": 1, "gemma-3-12b": 8, "qwen3-30b-a3b": 4, "llama-3-70b": 8}
"""Devices of JAX that cut the models."""
CHIPS_FOR_8B = {"v5e": 4, "tpu7x": 2}
"""Devices of JAX that hold Llama-3-8B, where one does not: chips of 16 GB, and the halves of a chip."""
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SHEETS = {"v4": "TPU-v4", "v5e": "TPU-v5e", "v5p": "TPU-v5p", "v6e": "TPU-v6e", "tpu7x": "TPU7x"}
"""Names of their data sheets (`sched/named_profiles.py`)."""
SHARE_OF_CHIP = {"tpu7x": 0.5}
"""Of a chip that one of JAX's devices is, where it is not all of it."""
ROWS, CHUNK = 64, 2048
NUM_LAYERS = {"gemma-3-12b": 6}
"""Of the executables of layers, where it is not `FEW_LAYERS`: a model's pattern of kinds."""
FEW_LAYERS = 2
"""Of the executables of other models: all layers are alike."""
NUM_PAGES, NUM_WINDOW_PAGES, PAGE_SIZE, MAX_MODEL_LEN = 20_000, 20_000, 16, 8192
CONTEXT = 1000
"""Tokens of context of each row of the predicted steps."""
SAMPLERS = ("sample", "shape", "remember", "logprobs", "enter")
"""Executables that depend on the vocabulary and the number of rows alone."""


class Case(NamedTuple):
    """Executables of one bucket.

    Attributes:
        tpu: a generation.
        bucket: query tokens.
        num_devices: that cut weights and pages.
        kinds: of the executables that are compiled; (): all.
        without: kinds that are left out.
        kv_cache_dtype: of the pages, as the engine's option.
    """

    tpu: str
    model: str
    bucket: int
    num_devices: int = 1
    kinds: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return MODELS[self.model]

    @property
    def compiled_config(self) -> ModelConfig:
        """Of its first layers."""
        config = self.config
        return replace(config, num_layers=self.num_layers, kinds=config.kinds[: self.num_layers])

    @property
    def num_layers(self) -> int:
        """Of the executables of layers."""
        return NUM_LAYERS.get(self.model, FEW_LAYERS)

    def takes(self, kind: str) -> bool:
        """Whether executables of this kind are compiled."""
        return kind not in self.without and (not self.kinds or kind in self.kinds)


def case_of(values: Sequence[Any]) -> Case:
    """A case as JSON has it."""
    tpu, model, bucket, num_devices, kinds, without, kv_cache_dtype = values
    return Case(tpu, model, bucket, num_devices, tuple(kinds), tuple(without), kv_cache_dtype)


def default_cases(tpus: Sequence[str] = TPUS) -> list[Case]:
    """Every model on every generation, all of a decode step and the layers of a chunk; Llama-3-8B on one device, and where one
    does not hold it on several, and with pages in fp8; and 16 chips of v5e."""
    cases = list[Case]()
    for tpu in tpus:
        for model in MODELS:
            cases.append(Case(tpu, model, ROWS, DEVICES[model]))
            cases.append(Case(tpu, model, CHUNK, DEVICES[model], kinds=("embed", "layers")))
        moved = ("layers", "gather", "scatter")
        cases.append(Case(tpu, "llama-3-8b", ROWS, CHIPS_FOR_8B.get(tpu, 1), kinds=moved, kv_cache_dtype="fp8"))
        if tpu in CHIPS_FOR_8B:
            cases.append(Case(tpu, "llama-3-8b", ROWS, CHIPS_FOR_8B[tpu], without=SAMPLERS))
    if "v5e" in tpus:
        cases.append(Case("v5e", "llama-3-70b", ROWS, 16, kinds=("embed", "layers", "head", "gather", "scatter")))
    return cases


def sample_cases() -> list[Case]:
    """What a test checks: the layers and transfers of Llama-3-8B on a v5e."""
    return [Case("v5e", "llama-3-8b", ROWS, kinds=("layers", "gather", "scatter"))]
