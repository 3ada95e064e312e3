"""How large everything is that a suite measures, and tiny sizes to prove a suite on a CPU. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.suite.models import SMALL_LLAMA, SMALL_QWEN3_NEXT
from jinfercept.models.config import ModelConfig

Row = dict[str, Any]
"""One measurement, ready for JSON; every part says what its rows hold."""

GIB = 1 << 30
MIB = 1 << 20


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

    staging_pages: int


class Checked(NamedTuple):
    """One shape of attention whose kernels are checked: (query heads, KV heads, head dim), page size, types, `Scoring`, and how
    its pages are quantised, if they are."""

    heads: tuple[int, int, int]
    page_size: int
    dtypes: tuple[str, ...] = ("bfloat16",)
    window: int | None = None
    soft_cap: float | None = None
    with_sinks: bool = False
    quantised: tuple[str, ...] = ()


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
        product, product_tokens: (inputs, outputs) of a quantised weight, and the rows that it is multiplied with.
        start: options of the start that is tried, beside the defaults.
        checked: shapes of attention whose kernels are checked.
        checked_models: whose tokens are compared.
        checked_kinds: the same, of models with layers of several kinds.
        decodes: (rows, context) of decode steps, what matters most first.
        mixed: (decoding rows, context, tokens of a chunk beside them) of a step.
        deep: (tokens of a chunk, tokens before it) of a step of its own.
        pool_tokens: of a runner's pool; less where memory is less.
        layers_per_step: those that are measured; most parts use the first one.
        overlap_ways, overlap_shares: ways of transferring, and shares of the link that steps are loaded with.
        transfer_pages: most pages that a step moves each way.
        transfer_rows: (rows, context) of the step that transfers hide behind.
        traced_steps: of a profiler's trace, beside those that fill and drain the pipeline.
        idle_steps: of one turn of the whole engine, and of its trace.
        policies, agents: the workloads of these parts.
        interleaved: pages of attention by itself lie as those of TPUs.
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
    product: tuple[int, int]
    product_tokens: tuple[int, ...]
    experts: tuple[ExpertsCase, ...]
    start: Mapping[str, Any]
    checked: tuple[Checked, ...]
    checked_models: Mapping[str, ModelConfig]
    checked_kinds: Mapping[str, ModelConfig]
    decodes: tuple[tuple[int, int], ...]
    mixed: tuple[int, int, int]
    deep: tuple[int, int]
    pool_tokens: int
    layers_per_step: tuple[int, ...]
    overlap_ways: tuple[TransferWay, ...]
    overlap_shares: tuple[float, ...]
    transfer_pages: int
    transfer_rows: tuple[int, int]
    traced_steps: int
    idle_steps: int
    policies: Policies
    agents: Agents
    interleaved: bool = False


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
    product=(128, 64),
    product_tokens=(3,),
    experts=(ExpertsCase("small", 4, 2, 64, 64, (3,)),),
    start={"kv_tokens": 256, "max_num_seqs": 8, "max_num_batched_tokens": 8, "page_size": 8},
    checked=(
        Checked((4, 2, 16), 16, ("bfloat16", "float32"), quantised=("int8",)),
        Checked((4, 2, 16), 16, ("float32",), 7, 2.0, True),
    ),
    checked_models={"llama": SMALL_LLAMA},
    checked_kinds={"qwen3-next": SMALL_QWEN3_NEXT},
    decodes=((8, 16),),
    mixed=(2, 8, 6),
    deep=(6, 24),
    pool_tokens=192,
    layers_per_step=(1,),
    overlap_ways=(TransferWay(2), TransferWay(1)),
    overlap_shares=(1.0,),
    transfer_pages=4,
    transfer_rows=(8, 16),
    traced_steps=2,
    idle_steps=2,
    policies=Policies("small", 1.0, 10.0, 0.02, 0.02, 256, 128, 8, 8),
    agents=Agents("small", 2, 0.1, 1.0, 0.001, 0.001, 256, 256, 256, 8, 8),
)
