"""How large everything is that the suite measures: full for a GPU, tiny to prove the suite on a CPU. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jinfercept.models.config import PLAIN_KIND, DeltaNetConfig, ExpertsConfig, LayerKind, ModelConfig, RopeConfig

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
SMALL_GEMMA2 = replace(
    SMALL_LLAMA,
    family="gemma",
    activation="gelu_new",
    post_norms=True,
    kinds=(LayerKind(window=24), PLAIN_KIND),
    soft_cap=2.0,
    logit_cap=3.0,
    tie_embeddings=True,
)
SMALL_GPT_OSS = replace(
    SMALL_LLAMA,
    kinds=(LayerKind(window=24), PLAIN_KIND),
    sinks=True,
    qkv_bias=True,
    o_bias=True,
    experts=ExpertsConfig(8, 2, 64, normalised=True, swiglu=(7.0, 1.702), biased=True),
)
SMALL_QWEN3_NEXT = replace(
    SMALL_LLAMA,
    family="qwen3_next",
    qk_norm=True,
    kinds=(LayerKind(is_recurrent=True), PLAIN_KIND),
    experts=ExpertsConfig(8, 2, 64, normalised=True, shared_ffn_size=64),
    attention_gate=True,
    delta_net=DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, num_taps=4),
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
        context: tokens up to each row's last query, itself included.
        window: tokens that a query sees of them; None: all.
    """

    heads: HeadSizes
    rows: int
    chunk: int
    context: int
    window: int | None = None

    @property
    def kv_bytes(self) -> int:
        """The keys and values that are read at least once."""
        return self.rows * min(self.context, self.chunk - 1 + (self.window or self.context)) * self.heads.token_bytes

    @property
    def flops(self) -> int:
        """Operations of the two products, over the pairs of query and key that see each other."""
        window = self.window or self.context
        seen = sum(min(window, self.context - before) for before in range(self.chunk))
        return 4 * self.heads.query * self.heads.dim * self.rows * seen

    def describe(self) -> Row:
        """What every row about this case begins with."""
        window = "" if self.window is None else f", window {self.window}"
        return {
            "model": self.heads.model,
            "heads": f"{self.heads.query}/{self.heads.kv} × {self.heads.dim}{window}",
            "rows": self.rows,
            "chunk": self.chunk,
            "context": self.context,
        }


class ExpertsCase(NamedTuple):
    """One product with the weights of experts.

    Attributes:
        model: whose they are.
        num_experts, per_token: of a layer.
        inputs, outputs: of the weight of an expert.
        tokens: of the steps that are timed.
    """

    model: str
    num_experts: int
    per_token: int
    inputs: int
    outputs: int
    tokens: tuple[int, ...]


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


class Agents(NamedTuple):
    """Sessions of agents on a model, scaled, and the pools that make them contended; see `bench replay` for the scales.

    Attributes:
        live: sessions at a time, which all begin within `warm_up_s`; turns of these seconds do not count.
    """

    model: str
    live: int
    warm_up_s: float
    duration_s: float
    scale_tokens: float
    scale_time: float
    max_model_len: int
    kv_tokens: int
    host_tokens: int
    max_num_seqs: int
    bucket: int


class TransferWay(NamedTuple):
    """A way in which pages cross the host link: fields of `RunnerShape`, by their names there. Another way is a field here."""

    transfer_parts: int
    staging_pages: int


class Checked(NamedTuple):
    """One shape of attention whose kernels are checked: (query heads, KV heads, head dim), page size, types, and `Scoring`."""

    heads: tuple[int, int, int]
    page_size: int
    dtypes: tuple[str, ...] = ("bfloat16",)
    window: int | None = None
    soft_cap: float | None = None
    with_sinks: bool = False


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run of the suite.

    Attributes:
        models: by name; the first one is used where one is enough.
        dtype: of weights and KV.
        page_size: tokens per page.
        enough_s: seconds of one turn of a timing of kernels.
        turn_steps: of one turn of a timing of steps.
        copy_bytes, matmul_size, link_bytes: of the ceilings; the last is a single array.
        calls: of attention in one executable, so that dispatch is not what is measured.
        attention: cases of kernels.
        experts: cases of products with experts' weights.
        attention_pool_bytes: of one layer's pages; cases that do not fit are left out.
        start: options of the start that is tried, beside the defaults.
        one_byte_pool: bytes of one layer's pages of int8.
        checked: shapes of attention whose kernels are checked.
        checked_models: whose tokens are compared.
        checked_kinds: the same, of models with layers of several kinds.
        decodes: (rows, context) of decode steps, what matters most first.
        mixed: (decoding rows, context, tokens of a chunk beside them) of a step.
        pool_tokens: of a runner's pool; less where memory is less.
        layers_per_step: those that are measured; most parts use the first one.
        upload_arrays: arrays of one call; `upload_bytes` of each.
        behind_bytes: of the copy that an upload goes behind.
        overlap_ways, overlap_shares: ways of transferring, and shares of the link that steps are loaded with, of `overlap`.
        transfer_ways, transfer_shares: the same of `transfers`.
        transfer_pages: most pages that a step moves each way.
        transfer_rows: (rows, context) of the step that transfers hide behind.
        traced_steps: of a profiler's trace, beside those that fill and drain the pipeline.
        idle_steps: of one turn of the whole engine, and of its trace.
        policies, agents: the workloads of these parts.
    """

    models: Mapping[str, ModelConfig]
    dtype: str
    page_size: int
    enough_s: float
    turn_steps: int
    copy_bytes: int
    matmul_size: int
    link_bytes: int
    calls: int
    attention: tuple[AttentionCase, ...]
    attention_pool_bytes: int
    experts: tuple[ExpertsCase, ...]
    start: Mapping[str, Any]
    one_byte_pool: int
    checked: tuple[Checked, ...]
    checked_models: Mapping[str, ModelConfig]
    checked_kinds: Mapping[str, ModelConfig]
    decodes: tuple[tuple[int, int], ...]
    mixed: tuple[int, int, int]
    pool_tokens: int
    layers_per_step: tuple[int, ...]
    upload_arrays: tuple[int, ...]
    upload_bytes: int
    behind_bytes: int
    overlap_ways: tuple[TransferWay, ...]
    overlap_shares: tuple[float, ...]
    transfer_ways: tuple[TransferWay, ...]
    transfer_shares: tuple[float, ...]
    transfer_pages: int
    transfer_rows: tuple[int, int]
    traced_steps: int
    idle_steps: int
    policies: Policies
    agents: Agents


GPTJ_HEADS = HeadSizes("gpt-j-6b", 16, 16, 256)
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
        *(AttentionCase(LLAMA_HEADS, *case) for case in ((1, 2048, 2048), (1, 512, 4096), (4, 512, 2048))),
        *(AttentionCase(LLAMA_HEADS, *case) for case in ((64, 1, 2048), (256, 1, 1024), (32, 1, 8192), (1, 1, 1024))),
        *(AttentionCase(GPTJ_HEADS, *case) for case in ((64, 1, 2048), (32, 1, 8192), (1, 512, 4096))),
        *(AttentionCase(GEMMA_HEADS, *case, window=512) for case in ((16, 1, 8192), (1, 512, 4096))),
    ),
    attention_pool_bytes=9 * 10**9,
    experts=(
        ExpertsCase("gpt-oss-20b", 32, 4, 2880, 5760, (1, 16, 64, 512, 2048)),
        ExpertsCase("qwen3-30b-a3b", 128, 8, 2048, 1536, (1, 64, 2048)),
    ),
    start={},
    one_byte_pool=2_500_000_000,
    checked=(
        Checked((32, 8, 128), 16, ("bfloat16", "float32")),
        Checked((16, 16, 256), 16),
        Checked((12, 12, 64), 16),
        Checked((8, 2, 96), 16),
        Checked((32, 8, 128), 64),
        Checked((8, 4, 256), 16, window=96, soft_cap=5.0),
        Checked((64, 8, 64), 16, window=128, with_sinks=True),
    ),
    checked_models={"llama": SMALL_LLAMA, "gptj": SMALL_GPTJ},
    checked_kinds={"gemma2": SMALL_GEMMA2, "gpt-oss": SMALL_GPT_OSS, "qwen3-next": SMALL_QWEN3_NEXT},
    decodes=((64, 1000), (1, 1000), (256, 1000)),
    mixed=(64, 512, 448),
    pool_tokens=280_000,
    layers_per_step=(4, 32, 8),
    upload_arrays=(1, 16, 256),
    upload_bytes=2 * MIB,
    behind_bytes=GIB,
    overlap_ways=(TransferWay(1, 128), TransferWay(1, 16)),
    overlap_shares=(1.0, 0.5),
    transfer_ways=(TransferWay(1, 1), TransferWay(1, 16), TransferWay(4, 1)),
    transfer_shares=(0.9, 1.0, 0.5),
    transfer_pages=512,
    transfer_rows=(64, 1000),
    traced_steps=8,
    idle_steps=20,
    policies=Policies("gpt-j-6b", 4.0, 50.0, 0.3, 0.2, 8_000, 32_000, 64, 512),
    agents=Agents("llama-3-8b", 12, 8.0, 50.0, 0.2, 0.1, 32_768, 48_000, 48_000, 64, 2048),
)
TINY = Sizes(
    models={"small": SMALL_LLAMA},
    dtype="float32",
    page_size=8,
    enough_s=0.001,
    turn_steps=4,
    copy_bytes=MIB,
    matmul_size=64,
    link_bytes=64 << 10,
    calls=1,
    attention=tuple(AttentionCase(HeadSizes("small", 4, 2, 16), *case) for case in ((2, 1, 12), (1, 8, 12))),
    attention_pool_bytes=MIB,
    experts=(ExpertsCase("small", 4, 2, 64, 64, (3,)),),
    start={"kv_tokens": 256, "max_num_seqs": 8, "max_num_batched_tokens": 8, "page_size": 8},
    one_byte_pool=64 << 10,
    checked=(Checked((4, 2, 16), 16, ("bfloat16", "float32")), Checked((4, 2, 16), 16, ("float32",), 7, 2.0, True)),
    checked_models={"llama": SMALL_LLAMA},
    checked_kinds={"qwen3-next": SMALL_QWEN3_NEXT},
    decodes=((8, 16),),
    mixed=(2, 8, 6),
    pool_tokens=192,
    layers_per_step=(1,),
    upload_arrays=(1, 2),
    upload_bytes=64,
    behind_bytes=MIB,
    overlap_ways=(TransferWay(1, 2), TransferWay(1, 1)),
    overlap_shares=(1.0,),
    transfer_ways=(TransferWay(1, 1), TransferWay(1, 2), TransferWay(2, 1)),
    transfer_shares=(0.9,),
    transfer_pages=4,
    transfer_rows=(8, 16),
    traced_steps=2,
    idle_steps=2,
    policies=Policies("small", 1.0, 10.0, 0.02, 0.02, 256, 128, 8, 8),
    agents=Agents("small", 2, 0.1, 1.0, 0.001, 0.001, 256, 256, 256, 8, 8),
)
