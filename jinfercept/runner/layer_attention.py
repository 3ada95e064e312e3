"""Attention as a step's layers call it: it writes keys and values into the pages, then attends to them."""

from jaxtyping import Array, Float, Int

from jinfercept.models.attention import paged_attention
from jinfercept.pallas.gpu_kernels import joined_attention
from jinfercept.pallas.layouts.interleaved import with_padded_heads
from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, write_kv
from jinfercept.pallas.layouts.scoring import PLAIN, Rotation, Scoring
from jinfercept.runner.packing import PackedShape


class StepAttention:
    """Attention of a step's layers with `num_kv_heads` KV heads on a device. It adds each layer's experts to `noted`."""

    def __init__(self, shape: PackedShape, step: Batch, noted: list[Int[Array, "T C"]], num_kv_heads: int) -> None:
        self._shape, self._step, self._noted, self._num_kv_heads = shape, step, noted, num_kv_heads

    def __call__(
        self,
        q: HeadRows,
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        pages: KVPages,
        scoring: Scoring = PLAIN,
    ) -> tuple[HeadRows, KVPages]:
        shape, step = self._shape, self._step
        if k is not None and v is not None:
            pages = write_kv(pages, k, v, step.write_index)
        scoring = scoring.within(shape.pages_per_row * pages.shape[1])
        queries = with_padded_heads(q, self._num_kv_heads, pages)
        attended = paged_attention(
            queries, pages, step, scoring=scoring, implementation=shape.attention, decode_only=shape.decode_only
        )
        return (attended if queries is q else attended[:, : q.shape[1]]), pages

    def note_experts(self, experts: Int[Array, "T C"]) -> None:
        self._noted.append(experts)


class JoinedAttention(StepAttention):
    """Also rotates queries and keys of decode rows. A model that rotates them itself calls it as any other attention."""

    _counts: Int[Array, "SK"] | None = None

    def joined(self, qkv: Float[Array, "T K G2 D"], rotation: Rotation, pages: KVPages) -> tuple[HeadRows, KVPages]:
        # a layer's kernel leaves its counts as the next one's needs them: the step fills them with zeros once
        out, pages, self._counts = joined_attention(qkv, rotation, pages, self._step, self._counts)
        return out, pages


def step_attention(shape: PackedShape, step: Batch, noted: list[Int[Array, "T C"]], num_kv_heads: int) -> StepAttention:
    """Make the attention of layers as `StepAttention` describes it."""
    return (JoinedAttention if shape.joined else StepAttention)(shape, step, noted, num_kv_heads)
