"""A model of a family served as three pure functions of its parameters: embed, one layer, head (`protocol.ServedModel`).

The parameters are plain pytrees of arrays (the pure state of `nnx.split`); the static halves are split off once, when a
`Model` is made. All layers share one of them, so one compiled layer serves all. The caller keeps keys and values: it passes
`attend`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jinfercept.models.blocks import Attend, Embed
from jinfercept.models.config import ModelConfig
from jinfercept.models.gptj import GPTJHead, GPTJLayer
from jinfercept.models.llama import LlamaHead, LlamaLayer
from jinfercept.models.protocol import ModelDimensions, Params, Weights

_BLOCKS = {"llama": (LlamaLayer, LlamaHead), "gptj": (GPTJLayer, GPTJHead)}


@dataclass(frozen=True)
class Model:
    """The functions of one model; call them under `jax.jit`. Equal and hashed by its fields.

    Attributes:
        config: of the model.
        joined: whether the weights of the same rows are joined, see `joined_weights.py`.
    """

    config: ModelConfig
    joined: bool = field(default_factory=lambda: joins(), repr=False)
    _embed: nnx.GraphDef[Embed] = field(init=False, repr=False, compare=False)
    _layer: nnx.GraphDef[LlamaLayer | GPTJLayer] = field(init=False, repr=False, compare=False)
    _head: nnx.GraphDef[LlamaHead | GPTJHead] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layer, head = _BLOCKS[self.config.family]
        layer = partial(layer, joined=self.joined)
        for name, block in (("_embed", Embed), ("_layer", layer), ("_head", head)):
            abstract = nnx.eval_shape(lambda block=block: block(self.config, jnp.float32))
            object.__setattr__(self, name, nnx.graphdef(abstract))

    def embed(self, params: Weights, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Vectors of the tokens; `params` is `Params.embed`."""
        return nnx.merge(self._embed, params)(tokens)

    def layer[KV](
        self, params: Weights, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        """One layer; `params` is one of `Params.layers`, `kv` whatever `attend` takes and returns."""
        return nnx.merge(self._layer, params)(x, positions, kv, attend)

    def head(self, params: Weights, x: Float[Array, "R E"]) -> Float32[Array, "R V"]:
        """Final norm and logits of the chosen rows; `params` is `Params.head`."""
        return nnx.merge(self._head, params)(x)


def joins() -> bool:
    """Whether JAX's default backend computes faster with joined weights: a GPU does, for which every launch costs. On a CPU the
    products of a layer run side by side while they are apart."""
    return jax.default_backend() != "cpu"


def abstract_params(config: ModelConfig, dtype: DTypeLike, *, joined: bool | None = None) -> Params:
    """The shapes and dtypes of the weights, for compiling and planning memory before they are loaded.

    Args:
        joined: as `Model` has it; by default that of JAX's default backend.
    """
    joined = joins() if joined is None else joined

    def shapes(block: Callable[[ModelConfig, DTypeLike], nnx.Module]) -> Weights:
        abstract = nnx.eval_shape(lambda: block(config, dtype))
        return cast(Weights, nnx.to_pure_dict(nnx.state(abstract)))

    layer, head = _BLOCKS[config.family]
    layer = partial(layer, joined=joined)
    return tied(config, Params(shapes(Embed), (shapes(layer),) * config.num_layers, shapes(head)))


def tied(config: ModelConfig, params: Params) -> Params:
    """The parameters with the head sharing the embedding's array, if the config says so."""
    if not config.tie_embeddings:
        return params
    return params._replace(head=params.head | {"unembed": params.embed["embedding"]})


def untied(config: ModelConfig, params: Params) -> Params:
    """The parameters without the array that `tied` adds to the head: every array once."""
    if not config.tie_embeddings:
        return params
    return params._replace(head={name: leaf for name, leaf in params.head.items() if name != "unembed"})


def param_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Device memory of the weights, tied embeddings counted once."""
    leaves = jax.tree.leaves(untied(config, abstract_params(config, dtype)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def kv_bytes_per_token(config: ModelDimensions, dtype: DTypeLike) -> int:
    """Keys and values of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
