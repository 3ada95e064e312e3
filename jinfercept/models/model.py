"""A model of a family served as three pure functions of its parameters: embed, one layer, head (`protocol.ServedModel`).

The parameters are plain pytrees of arrays (the pure state of `nnx.split`); the static halves are split off once, when a
`Model` is made. Layers of a kind share one of them, so one compiled layer serves them. The caller keeps keys and values: it
passes `attend`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jinfercept.cpu_kernels import native
from jinfercept.models.blocks import Attend, Embed
from jinfercept.models.config import PLAIN_KIND, LayerKind, ModelConfig
from jinfercept.models.gemma4 import Gemma4Embed, Gemma4Head, Gemma4Layer
from jinfercept.models.gptj import GPTJHead, GPTJLayer
from jinfercept.models.llama import LlamaHead, LlamaLayer, normed
from jinfercept.models.nemotron_h import Mamba2Layer
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.qwen3_next import DeltaNetLayer, DraftLayer, state_arrays
from jinfercept.models.sharding import cut_axis, padded_vocabulary, serving_config
from jinfercept.pallas.layouts.kv_rows import row_width
from jinfercept.pallas.layouts.packed_weights import ExpertSides
from jinfercept.pallas.layouts.states import StateArray

EXPERT_SIDES = "experts_gate_up"
"""The weight that `parts_experts` is about."""
_BLOCKS = {
    "llama": (Embed, LlamaLayer, LlamaHead),
    "gptj": (Embed, GPTJLayer, GPTJHead),
    "gemma": (Embed, LlamaLayer, LlamaHead),
    "gemma4": (Gemma4Embed, Gemma4Layer, Gemma4Head),
    "qwen3_next": (Embed, LlamaLayer, LlamaHead),
    "nemotron_h": (Embed, LlamaLayer, LlamaHead),
}


@dataclass(frozen=True)
class Model:
    """The functions of one model; call them under `jax.jit`. Equal and hashed by its fields.

    Attributes:
        joined: whether the weights of the same rows are joined, see `joined_weights.py`.
        stored_config: the config as the checkpoint has it, where that of the devices is another one, see `on_devices`.
    """

    config: ModelConfig
    joined: bool = field(default_factory=lambda: joins(), repr=False)
    stored_config: ModelConfig | None = field(default=None, repr=False)
    _embed: nnx.GraphDef[Embed] = field(init=False, repr=False, compare=False)
    _layers: Mapping[LayerKind, nnx.GraphDef[LlamaLayer | GPTJLayer]] = field(init=False, repr=False, compare=False)
    _head: nnx.GraphDef[LlamaHead | GPTJHead] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        blocks = _abstract_blocks(self.config, "float32", self.joined)
        object.__setattr__(self, "_embed", blocks.embed.static)
        object.__setattr__(self, "_layers", {kind: block.static for kind, block in blocks.layers.items()})
        object.__setattr__(self, "_head", blocks.head.static)

    def on_devices(self, num_devices: int) -> "Model":
        """The model as so many devices serve it, with KV heads repeated where they do not divide evenly, and with the weights
        joined that are served joined. Raises `ConfigError` if the model cannot be cut into so many parts."""
        config = serving_config(self.config, num_devices)
        return replace(self, config=config, stored_config=self.checkpoint_config, joined=joins())

    @property
    def checkpoint_config(self) -> ModelConfig:
        """The config with the KV heads of the checkpoint, and its experts."""
        return self.stored_config or self.config

    @property
    def kv_repeats(self) -> int:
        """How often each KV head of the checkpoint is repeated among those of `config`."""
        return self.config.num_kv_heads // self.checkpoint_config.num_kv_heads

    @property
    def windowed_config(self) -> ModelConfig:
        """The config with the sizes of the layers that see a window."""
        windowed = next((kind for kind in self.config.kinds if kind.window is not None), PLAIN_KIND)
        return self.config.of_kind(windowed)

    @property
    def kv_places(self) -> tuple[int, ...]:
        """See `protocol.kv_places`."""
        kinds = [self.config.kind(layer) for layer in range(self.config.num_layers)]
        own = [layer for layer, kind in enumerate(kinds) if kind.kv_from is None]
        return tuple(own.index(layer if kind.kv_from is None else kind.kv_from) for layer, kind in enumerate(kinds))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer; () if all are of the plain kind."""
        return self.config.kinds

    def layer_window(self, kind: LayerKind) -> int | None:
        """Tokens that a token sees in layers of this kind; None: all before it."""
        return kind.window

    def layer_states(self, kind: LayerKind) -> tuple[StateArray, ...]:
        """The state of a recurrent layer of this kind; () if such layers have keys and values."""
        sizes = self.config.delta_net
        return state_arrays(sizes) if kind.is_recurrent and sizes is not None else ()

    def embed(self, params: Weights, tokens: Int[Array, "T"], positions: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Vectors of the tokens; `params` is `Params.embed`."""
        return nnx.merge(self._embed, params)(tokens)

    def layer[KV](
        self,
        params: Weights,
        x: Float[Array, "T E"],
        positions: Int[Array, "T"],
        kv: KV,
        attend: Attend[KV],
        *,
        kind: LayerKind = PLAIN_KIND,
    ) -> tuple[Float[Array, "T E"], KV]:
        """One layer of this kind; `params` is one of `Params.layers`, `kv` whatever `attend` takes and returns."""
        return nnx.merge(self._layers[kind], params)(x, positions, kv, attend)

    def draft_inputs(
        self, params: Weights, following: Float[Array, "T E"], x: Float[Array, "T E"], norm: Float[Array, "E"]
    ) -> Float[Array, "T E"]:
        """What the layer that drafts reads, see `DraftLayer.inputs`.

        Args:
            params: of that layer, the last one of `Params.layers`.
            following: the vectors of the next tokens.
            x: the output of a layer before the norm with this weight.
        """
        layer = nnx.merge(self._layers[self.config.kinds[-1]], params)
        return layer.inputs(following, normed(x, nnx.Param(norm), self.config))

    def assistant_ends(self, params: Params) -> tuple[Gemma4Embed, Gemma4Head]:
        """The embedding and the head of an assistant."""
        return cast(Any, (nnx.merge(self._embed, params.embed), nnx.merge(self._head, params.head)))

    def head(self, params: Weights, x: Float[Array, "R E"]) -> Float32[Array, "R V"]:
        """Final norm and logits of the chosen rows; `params` is `Params.head`."""
        return nnx.merge(self._head, params)(x)


def joins() -> bool:
    """Whether JAX's default backend computes faster with joined weights: where every call of a kernel costs. Where XLA computes
    everything on a CPU, the products of a layer run side by side while they are apart."""
    return jax.default_backend() != "cpu" or native.usable()


def parts_experts() -> bool:
    """Whether joined weights have the gates of experts apart, see `ExpertSides`: where JAX's default backend is a TPU."""
    return jax.default_backend() == "tpu"


def abstract_params(
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    joined: bool | None = None,
    num_devices: int = 1,
    experts_apart: bool | None = None,
) -> Params:
    """The shapes and dtypes of the weights, for compiling and planning memory before they are loaded.

    Args:
        joined: as `Model` has it; by default that of JAX's default backend.
        num_devices: that serve the weights; the vocabulary is padded so that they cut it evenly.
        experts_apart: whether joined weights have the gates of experts apart; by default `parts_experts`.
    """
    joined = joins() if joined is None else joined
    experts_apart = joined and (parts_experts() if experts_apart is None else experts_apart)
    config = replace(config, vocab_size=padded_vocabulary(config.vocab_size, num_devices))

    def shapes(block: _AbstractBlock) -> Weights:
        weights = dict(block.weights)
        if experts_apart and EXPERT_SIDES in weights:
            weights[EXPERT_SIDES] = jax.eval_shape(ExpertSides.of, weights[EXPERT_SIDES])
        return weights

    blocks = _abstract_blocks(config, jnp.dtype(dtype).name, joined)
    by_kind = {kind: shapes(block) for kind, block in blocks.layers.items()}
    layers = tuple(by_kind[config.kind(index)] for index in range(config.num_layers))
    return tied(config, Params(shapes(blocks.embed), layers, shapes(blocks.head)))


class _AbstractBlock(NamedTuple):
    """A block without its numbers: the static half of its module, and the shapes of its weights."""

    static: nnx.GraphDef[Any]
    weights: Weights


class _AbstractBlocks(NamedTuple):
    embed: _AbstractBlock
    layers: Mapping[LayerKind, _AbstractBlock]
    head: _AbstractBlock


@lru_cache(32)
def _abstract_blocks(config: ModelConfig, dtype: str, joined: bool) -> _AbstractBlocks:
    """The blocks of a model, made once: a start asks for them about ten times, and JAX traces each for milliseconds."""

    def abstract(block: Callable[[ModelConfig, DTypeLike], nnx.Module]) -> _AbstractBlock:
        static, state = nnx.split(nnx.eval_shape(lambda: block(config, dtype)))
        return _AbstractBlock(static, cast(Weights, nnx.to_pure_dict(state)))

    embed, layer, head = _BLOCKS[config.family]
    recurrent = Mamba2Layer if config.family == "nemotron_h" else DeltaNetLayer
    layers = {
        kind: abstract(
            partial(recurrent if kind.is_recurrent else DraftLayer if kind.drafts else layer, kind=kind, joined=joined)
        )
        for kind in {PLAIN_KIND, *config.kinds}
    }
    return _AbstractBlocks(abstract(embed), layers, abstract(head))


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


def param_bytes(config: ModelConfig, dtype: DTypeLike, num_devices: int = 1) -> int:
    """Memory of the weights on each of the devices, tied embeddings counted once."""
    params = untied(config, abstract_params(config, dtype, num_devices=num_devices))
    return sum(
        leaf.size * leaf.dtype.itemsize // (1 if cut_axis(name) is None else num_devices)
        for block in (params.embed, *params.layers, params.head)
        for name, leaf in block.items()
    )


def kv_bytes_per_token(config: ModelConfig, dtype: DTypeLike, *, windowed: bool | None = None) -> int:
    """Keys and values of one token over all layers, in page arrays of this type, see `kv_rows.stored_dtype`.

    Args:
        windowed: count only layers that see a window, or only the others.
    """
    kinds = [config.kind(index) for index in range(config.num_layers)]
    own = [kind for kind in kinds if not kind.is_recurrent and kind.kv_from is None]
    sizes = [config.of_kind(kind) for kind in own if windowed in (None, kind.window is not None)]
    numbers = sum(layer.num_kv_heads * row_width(layer.head_dim, dtype) for layer in sizes)
    return 2 * numbers * jnp.dtype(dtype).itemsize
