"""How large everything is that the suite measures: full for a GPU, tiny to prove the suite on a CPU. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.sim.overflow import at_once
from jinfercept.sim.overflow_figures import OverflowSizes

Row = dict[str, Any]
"""One measurement, ready for JSON; every part says what its rows hold."""

GIB = 1 << 30
MIB = 1 << 20

GPTJ_6B = ModelConfig(
    family="gptj",
    vocab_size=50400,
    hidden_size=4096,
    num_layers=28,
    num_heads=16,
    num_kv_heads=16,
    head_dim=256,
    ffn_size=16384,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, rotary_dim=64, interleaved=True),
    tie_embeddings=False,
    max_position=8192,  # trained with 2,048; contexts here are longer, and weights random
    eos_token_ids=(),
    activation="gelu_new",
)
LLAMA_3_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0, rotary_dim=128),
    tie_embeddings=False,
    max_position=8192,
    eos_token_ids=(),
    activation="silu",
)
SMALL_GPTJ = replace(
    GPTJ_6B,
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=128,
    rope=RopeConfig(theta=10_000.0, rotary_dim=8, interleaved=True),
    max_position=512,
)
SMALL_LLAMA = replace(
    LLAMA_3_8B,
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    rope=RopeConfig(theta=10_000.0, rotary_dim=16),
    max_position=512,
)


class HeadSizes(NamedTuple):
    """The heads of one attention layer, and whose they are."""

    model: str
    query: int
    kv: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer, in 16-bit numbers."""
        return 4 * self.kv * self.dim


class AttentionCase(NamedTuple):
    """One attention over `rows` sequences.

    Attributes:
        heads: of the layer.
        rows: sequences.
        chunk: query tokens of each; 1 is decoding.
        context: tokens that each row's last query sees, itself included.
    """

    heads: HeadSizes
    rows: int
    chunk: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """The keys and values that are read at least once."""
        return self.rows * self.context * self.heads.token_bytes

    @property
    def flops(self) -> int:
        """Operations of the two products, over the pairs of query and key that see each other."""
        pairs = self.rows * (self.chunk * self.context - self.chunk * (self.chunk - 1) // 2)
        return 4 * self.heads.query * self.heads.dim * pairs

    def describe(self) -> Row:
        """What every row about this case begins with."""
        return {
            "model": self.heads.model,
            "heads": f"{self.heads.query}/{self.heads.kv} × {self.heads.dim}",
            "rows": self.rows,
            "chunk": self.chunk,
            "context": self.context,
        }


class Policies(NamedTuple):
    """A scaled mixed workload and the pools that make it contended; see `bench replay` for the scales."""

    model: str
    rate: float
    duration_s: float
    scale_tokens: float
    scale_time: float
    kv_tokens: int
    host_tokens: int
    max_num_seqs: int
    bucket: int


class Overflows(NamedTuple):
    """The batches of the study of overflow, of one model.

    Attributes:
        model: its shape.
        figures: those of the study that are measured.
        sizes: of their batches.
        tokens: most query tokens of a step.
        swap_space: of every engine, GiB.
    """

    model: ModelConfig
    figures: tuple[int, ...]
    sizes: OverflowSizes
    tokens: int
    swap_space: float


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run of the suite.

    Attributes:
        models: by name; the first one is used where one is enough.
        dtype: of weights and KV.
        page_size: tokens per page.
        enough_s: seconds of one turn of a timing.
        copy_bytes, matmul_size, link_bytes: of the ceilings; the last are single arrays.
        calls: of attention in one executable, so that dispatch is not what is measured.
        attention: cases of kernels.
        attention_pool_bytes: of one layer's pages; cases that do not fit are left out.
        checked_heads: (query heads, KV heads, head dim) of the correctness checks.
        checked_pages: page sizes of the same.
        checked_dtypes: of the same, with the largest error that is right.
        checked_models: whose tokens are compared with the CPU's.
        decodes: (rows, context) of decode steps, what matters most first.
        between_buckets: the same of steps that fill no bucket of an engine with its defaults.
        mixed: (decoding rows, context, tokens of a chunk beside them) of a step.
        pool_tokens: most tokens of a runner's pool; less where memory is less.
        layers_per_step: those that are measured; most parts use the first one.
        transfer_parts: those that are measured.
        staging_pages: most pages of a host array, those that are measured.
        transfer_shares: of the link's bandwidth, that steps are loaded with.
        transfer_pages: most pages that a step moves each way.
        transfer_rows: (rows, context) of the step that transfers hide behind.
        idle_steps: steps that are traced.
        policies: the workload of that part.
        overflow: the batches of that part.
    """

    models: Mapping[str, ModelConfig]
    dtype: str
    page_size: int
    enough_s: float
    copy_bytes: int
    matmul_size: int
    link_bytes: tuple[int, ...]
    calls: int
    attention: tuple[AttentionCase, ...]
    attention_pool_bytes: int
    checked_heads: tuple[tuple[int, int, int], ...]
    checked_pages: tuple[int, ...]
    checked_dtypes: Mapping[str, float]
    checked_models: Mapping[str, ModelConfig]
    decodes: tuple[tuple[int, int], ...]
    between_buckets: tuple[tuple[int, int], ...]
    mixed: tuple[int, int, int]
    pool_tokens: int
    layers_per_step: tuple[int, ...]
    transfer_parts: tuple[int, ...]
    staging_pages: tuple[int, ...]
    transfer_shares: tuple[float, ...]
    transfer_pages: int
    transfer_rows: tuple[int, int]
    idle_steps: int
    policies: Policies
    overflow: Overflows


def _cases(heads: HeadSizes, batches: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[AttentionCase, ...]:
    decoding = (AttentionCase(heads, rows, 1, context) for rows in batches for context in contexts)
    chunks = ((1, 512, 512), (1, 2048, 2048), (1, 512, 4096), (4, 512, 2048))
    return (*decoding, *(AttentionCase(heads, *case) for case in chunks))


FULL = Sizes(
    models={"llama-3-8b": LLAMA_3_8B, "gpt-j-6b": GPTJ_6B},
    dtype="bfloat16",
    page_size=16,
    enough_s=0.05,
    copy_bytes=GIB,
    matmul_size=8192,
    link_bytes=(64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    calls=8,
    attention=tuple(
        case
        for heads in (HeadSizes("gpt-j-6b", 16, 16, 256), HeadSizes("llama-3-8b", 32, 8, 128))
        for case in _cases(heads, (64, 32, 256, 16, 1), (2048, 512, 8192))
    ),
    attention_pool_bytes=9 * 10**9,
    checked_heads=((16, 16, 256), (32, 8, 128), (12, 12, 64), (8, 2, 96)),
    checked_pages=(16, 64),
    checked_dtypes={"float32": 1e-4, "bfloat16": 1e-2},
    checked_models={"llama": SMALL_LLAMA, "gptj": SMALL_GPTJ},
    decodes=((64, 1000), (1, 1000), (256, 1000), (48, 8000)),
    between_buckets=((64, 1000), (256, 1000), (48, 1000), (96, 1000), (200, 1000)),
    mixed=(64, 512, 448),
    pool_tokens=600_000,
    layers_per_step=(4, 32, 8, 1),
    transfer_parts=(1, 4),
    staging_pages=(1, 16),
    transfer_shares=(0.9, 1.0, 0.5),
    transfer_pages=128,
    transfer_rows=(64, 512),
    idle_steps=20,
    policies=Policies("gpt-j-6b", 4.0, 100.0, 0.3, 0.2, 16_000, 32_000, 64, 512),
    overflow=Overflows(
        replace(GPTJ_6B, num_layers=8),  # six engines at once have to fit
        (2, 3, 4, 5),
        OverflowSizes(
            page_sizes=(16, 64),
            evicted=(512, 2048),
            lengths=(256, 512),
            batch=at_once(375, 64, 32),
            shares=(0.1, 0.3, 0.5),
            seeds=3,
            repeats=2,
        ),
        512,
        4.0,
    ),
)
TINY = Sizes(
    models={"small": SMALL_LLAMA},
    dtype="float32",
    page_size=8,
    enough_s=0.001,
    copy_bytes=MIB,
    matmul_size=64,
    link_bytes=(64 << 10,),
    calls=1,
    attention=tuple(AttentionCase(HeadSizes("small", 4, 2, 16), *case) for case in ((2, 1, 12), (1, 8, 12))),
    attention_pool_bytes=MIB,
    checked_heads=((4, 2, 16),),
    checked_pages=(16,),
    checked_dtypes={"float32": 1e-4},
    checked_models={"llama": SMALL_LLAMA},
    decodes=((8, 16),),
    between_buckets=((3, 16),),
    mixed=(2, 8, 6),
    pool_tokens=192,
    layers_per_step=(1,),
    transfer_parts=(2,),
    staging_pages=(1, 2),
    transfer_shares=(0.9,),
    transfer_pages=4,
    transfer_rows=(8, 16),
    idle_steps=2,
    policies=Policies("small", 1.0, 10.0, 0.02, 0.02, 256, 128, 8, 8),
    overflow=Overflows(
        SMALL_LLAMA,
        (5,),
        OverflowSizes((8,), (24,), (24,), at_once(6, 18, 6, page_size=8), (0.5,)),
        32,
        0.1,
    ),
)
