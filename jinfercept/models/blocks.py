"""Parts that the model families share: the token embedding, the norms, and the one product that applies every weight."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jinfercept.cpu_kernels import native
from jinfercept.models.adapted import AdaptedTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.parallel import look_up, num_devices, sum_of_devices
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.weight_axes import IN_FLOAT32, WEIGHT_AXES, weight_shape
from jinfercept.pallas.layouts.rows import Activation, Gated, Rows, dense, gated, precision
from jinfercept.pallas.layouts.scoring import PLAIN, Rotation, Scoring

FEWEST_ROWS = 4
"""Least rows of a product of 16-bit numbers: XLA multiplies a single row without matrix kernels.

On a CPU that takes ten times as long as four rows; on a GPU it uses neither tensor cores nor most multiprocessors.
"""


@runtime_checkable
class Attend[KV](Protocol):
    """Attention over a cache, given by the caller.

    Writes `k` and `v` into the cache, lets every query attend to the visible tokens (scores scaled by `1 / sqrt(D)`, and as
    `scoring` says), and returns the result in q's dtype with the cache. Without `k` and `v` it writes nothing: another layer
    has written them.
    """

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        kv: KV,
        /,
        scoring: Scoring = PLAIN,
    ) -> tuple[Float[Array, "T H D"], KV]: ...


@runtime_checkable
class AttendJoined[KV](Attend[KV], Protocol):
    """Attention that also rotates queries and keys itself, and takes them as the joined product leaves them."""

    def joined(self, qkv: Float[Array, "T K G2 D"], rotation: Rotation, kv: KV, /) -> tuple[Float[Array, "T H D"], KV]:
        """Attention for the heads that `separate_heads` makes of `qkv`, queries and keys normed and rotated."""
        ...


@runtime_checkable
class NotesExperts(Protocol):
    """Attention whose caller also wants to know which experts compute each token."""

    def note_experts(self, experts: Int[Array, "T C"], /) -> None:
        """Called once by each layer that has experts, while it is traced."""
        ...


class Block(nnx.Module):
    """A module with weights of `weight_axes.py` as attributes, each an `nnx.Param`; a weight that it lacks is None."""

    def make_weights(self, names: Iterable[str], config: ModelConfig, dtype: DTypeLike) -> None:
        """Zeros for the weights of these names."""
        for name in names:
            own_dtype = jnp.float32 if name in IN_FLOAT32 else dtype
            setattr(self, name, nnx.Param(jnp.zeros(weight_shape(name, config), own_dtype)))

    def __getattr__(self, name: str) -> Any:
        if name in WEIGHT_AXES:
            return None
        raise AttributeError(name)


class Embed(Block):
    """Token ids to vectors."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        # Gemma's is the root of their width
        is_gemma = config.family in ("gemma", "gemma4")
        self.multiplier = config.hidden_size**0.5 if is_gemma else config.embedding_multiplier
        self.make_weights(("embedding",), config, dtype)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        x = look_up(self.embedding.get_value(), tokens)
        return x if self.multiplier == 1.0 else x * jnp.asarray(self.multiplier, x.dtype)


def project(
    spec: str,
    x: Float[Array, "..."] | Rows,
    weight: nnx.Param[Any],
    bias: nnx.Param[Float[Array, "..."]] | None = None,
    out: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """`einsum(spec, x, weight) + bias`, with float32 multiplied as float32.

    Args:
        spec: the first axis of `x` are rows; the result has the remaining axes of `x`, then those of the weight.
        x: an array, or `Rows` that the kernel of a quantised weight may compute.
        weight: an array, a `QuantizedTensor`, which is multiplied as it lies, or one of these with adapters (`AdaptedTensor`).
        out: dtype of the product; None: that of `x`.
    """
    weights = weight.get_value()
    if isinstance(weights, AdaptedTensor):
        return biased(_changed(_product(spec, x, weights.base, out), spec, x, weights), bias)
    return biased(_product(spec, x, weights, out), bias)


def _product(
    spec: str, x: Float[Array, "..."] | Rows, weights: Any, out: DTypeLike | None = None
) -> Float[Array, "..."]:
    if isinstance(weights, QuantizedTensor):
        return weights.product(x, out)
    x = x if isinstance(x, jax.Array) else dense(x)
    if (kernel := _kernel(spec, x, weights, out or x.dtype)) is None:
        return _by_xla(spec, out, x, weights)
    return jax.lax.platform_dependent(x, weights, cpu=kernel, default=partial(_by_xla, spec, out))


def _changed(
    y: Float[Array, "T ..."], spec: str, x: Float[Array, "..."] | Rows, weights: AdaptedTensor
) -> Float[Array, "T ..."]:
    def changed(y: Float[Array, "T ..."], x: Any, a: Any, b: Any, rows: Any) -> Float[Array, "T ..."]:
        return y + _change(spec, x, replace(weights, a=a, b=b, rows=rows), y.dtype)

    def changed_if_any(y: Float[Array, "T ..."], *operands: Any) -> Float[Array, "T ..."]:
        return jax.lax.cond(jnp.any(weights.rows), changed, lambda y, *_: y, y, *operands)

    operands = y, x, weights.a, weights.b, weights.rows
    # a GPU's branch would wait for the host
    return jax.lax.platform_dependent(*operands, cpu=changed_if_any, default=changed)


def _change(spec: str, x: Float[Array, "..."] | Rows, weights: AdaptedTensor, out: DTypeLike) -> Float[Array, "T ..."]:
    left = spec.split(",")[0]
    inner = weights.own_columns(_product(f"{left},{left[1:]}pc->{left[0]}pc", x, weights.a))
    present = iter(range(inner.shape[1]))
    parts = [None if b is None else _outer(inner[:, next(present)], b, out) for b in weights.b]
    return weights.joined(parts)


def _outer(inner: Float[Array, "T C"], b: Float[Array, "C ..."], out: DTypeLike) -> Float[Array, "T ..."]:
    axes = "xyz"[: b.ndim - 1]
    return _product(f"tc,c{axes}->t{axes}", inner, b, out)


def biased(y: Float[Array, "T *axes"], bias: nnx.Param[Any] | None) -> Float[Array, "T *axes"]:
    """Add a bias to each row, in models that have one."""
    return y if bias is None else y + bias[...].astype(y.dtype)[None]


def _by_xla(
    spec: str, out: DTypeLike | None, x: Float[Array, "..."], weight: Float[Array, "..."]
) -> Float[Array, "..."]:
    left, right = spec.split("->")[0].split(",")
    shared = [letter for letter in left if letter in right]  # einsum takes them by the alphabet, and copies the weight
    axes = [left.index(letter) for letter in shared], [right.index(letter) for letter in shared]
    # a GPU's default for float32 would be TF32; 16-bit numbers are summed in float32 anyway
    product = jnp.tensordot(_padded(x), weight, axes, precision=precision(x.dtype), preferred_element_type=out)
    return product[: len(x)]


def _kernel(
    spec: str, x: Float[Array, "..."], weight: Float[Array, "..."], out: DTypeLike
) -> Callable[..., Float[Array, "..."]] | None:
    if not native.usable() or num_devices() > 1:
        return None
    from jinfercept.cpu_kernels import products

    transposed, depth, out_shape = _matrix(spec, x, weight)
    matrix = (-1, depth) if transposed else (depth, -1)
    shapes = (len(x), depth), (prod(out_shape), depth)
    if not products.supports_dense(*shapes, x.dtype, weight.dtype, transposed=transposed):
        return None

    def multiply(x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
        rows = x.reshape(len(x), depth)
        y = products.dense_product(rows, weight.reshape(matrix), transposed=transposed, out=out)
        return y.reshape(len(x), *out_shape)

    return multiply


def _matrix(spec: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> tuple[bool, int, tuple[int, ...]]:
    """Whether a weight's rows are its outputs; its number of inputs; and the axes of its outputs."""
    left, right = spec.split("->")[0].split(",")
    num_shared, transposed = len(left) - 1, not right.startswith(left[1:])
    return transposed, prod(x.shape[1:]), weight.shape[:-num_shared] if transposed else weight.shape[num_shared:]


def project_gated(
    x: Rows,
    gate_up: nnx.Param[Any],
    down: nnx.Param[Any],
    gate_up_bias: nnx.Param[Float[Array, "2 F"]] | None = None,
    *,
    activation: Activation = "silu",
) -> Float[Array, "T E"]:
    """A gated feed-forward network, `(act(x @ gate) * (x @ up)) @ down`, of joined matrices `[2, E, F]` and one `[F, E]`."""
    weights = gate_up.get_value()
    both = weights.base if isinstance(weights, AdaptedTensor) else weights
    if isinstance(both, QuantizedTensor):
        sides = both.products(x)
        sides = biased(sides if both is weights else _changed(sides, "te,ef->tf", x, weights), gate_up_bias)
        rows = Gated(sides) if activation == "silu" else gated(sides[:, 0], sides[:, 1], activation)
        return project("tf,fe->te", rows, down)
    gates = _project_each(dense(x), both)
    if both is not weights:
        gates = jnp.moveaxis(_changed(jnp.moveaxis(gates, 0, 1), "te,ef->tf", x, weights), 1, 0)
    gates = gates if gate_up_bias is None else gates + gate_up_bias[...][:, None]
    return project("tf,fe->te", gated(gates[0], gates[1], activation), down)


def _project_each(x: Float[Array, "T E"], stack: Float[Array, "G E F"]) -> Float[Array, "G T F"]:
    rows, batch = _padded(x), (((2,), (1,)), ((0,), (0,)))  # sums over E, for every matrix
    # one batch, which is faster than one wide product on a CPU
    rows = jnp.broadcast_to(rows, (len(stack), *rows.shape))
    return jax.lax.dot_general(rows, stack, batch, precision=precision(x.dtype))[:, : len(x)]


def _padded(x: Float[Array, "T *axes"]) -> Float[Array, "R *axes"]:
    missing = 0 if x.dtype == jnp.float32 else max(0, FEWEST_ROWS - len(x))
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) if missing else x


def separate_heads(
    qkv: Shaped[Array, "*rows K G2 D"],
) -> tuple[Shaped[Array, "*rows H D"], Shaped[Array, "*rows K D"], Shaped[Array, "*rows K D"]]:
    """Split rows by KV head, each with its query heads, its key and its value, into queries, keys and values."""
    *rows, num_kv_heads, width, head_dim = qkv.shape
    queries = qkv[..., :-2, :].reshape(*rows, num_kv_heads * (width - 2), head_dim)
    return queries, qkv[..., -2, :], qkv[..., -1, :]


def rms_norms_of_all_heads(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    q_scale: nnx.Param[Float[Array, "H D"]],
    k_scale: nnx.Param[Float[Array, "K D"]],
    eps: float,
) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"]]:
    """Norm queries and keys, each over all heads of a token, those of other devices too."""
    squares = jnp.stack([jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2)) for x in (q, k)])
    q_squares, k_squares = sum_of_devices(squares)

    def normed(
        x: Float[Array, "T N D"], squares: Float[Array, "T"], scale: nnx.Param[Float[Array, "N D"]]
    ) -> Float[Array, "T N D"]:
        mean = squares / (x.shape[1] * x.shape[2] * num_devices())
        wide = x.astype(jnp.float32) * jax.lax.rsqrt(mean + eps)[:, None, None]
        return wide.astype(x.dtype) * scale[...][None]

    return normed(q, q_squares, q_scale), normed(k, k_squares, k_scale)


def layer_norm(
    x: Float[Array, "T E"], scale: nnx.Param[Float[Array, "E"]], bias: nnx.Param[Float[Array, "E"]], eps: float
) -> Float[Array, "T E"]:
    """Layer norm in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    scale_row, bias_row = (param[...].astype(jnp.float32)[None] for param in (scale, bias))
    return (wide * scale_row + bias_row).astype(x.dtype)
