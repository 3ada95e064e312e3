"""The interface between the engine and a model: a few numbers, and three functions of arrays.

`Model` in `model.py` implements it for the checkpoints of the supported families; a custom model goes to
`LLM(model, params=...)` (`examples/own_model.py`).
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Float32, Int

from jinfercept.models.blocks import Attend
from jinfercept.pallas.layouts.states import StateArray

Weights = dict[str, Any]
"""One block's parameters: a pytree of arrays, or of their shapes (`jax.ShapeDtypeStruct`)."""


class Params(NamedTuple):
    """A model's weights. Layers of one kind have the same structure and shapes; tied embeddings are one array, not two."""

    embed: Weights
    layers: tuple[Weights, ...]
    head: Weights


class ModelDimensions(Protocol):
    """The sizes by which memory, pages and executables are planned. Its `repr` names the model in profiles and stored pages.

    Attributes:
        family: a name, for people.
        vocab_size: columns of the logits.
        hidden_size: width of the residual stream.
        num_heads, num_kv_heads, head_dim: shape of the queries, keys and values of one layer.
        max_position: tokens of the longest sequence.
        eos_token_ids: tokens at which generation ends.
    """

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def num_kv_layers(config: ModelDimensions) -> int:
    """Layers that have keys and values: the config's `num_kv_layers`, which those of recurrent models have; else all."""
    return getattr(config, "num_kv_layers", config.num_layers)


def num_draft_layers(config: ModelDimensions) -> int:
    """The last ones of the layers, which draft and are no part of the model's own computation."""
    return getattr(config, "num_draft_layers", 0)


def windowed_config(model: "ServedModel") -> ModelDimensions:
    """The config with the sizes of the layers that see a window; the model's own, the same object, unless it says others."""
    return getattr(model, "windowed_config", model.config)


def kv_places(model: "ServedModel") -> tuple[int, ...]:
    """By layer, the place of what it reads among the layers with pages or states of their own; some layers may have none."""
    return getattr(model, "kv_places", tuple(range(model.config.num_layers)))


@runtime_checkable
class CutModel(Protocol):
    """A `ServedModel` that several devices can compute.

    Its functions get each device's part of the weights, and return what they would return on one device: partial sums are added
    by `parallel.add_partial_sums`. Queries, keys and values are those of the device's heads.
    """

    def partition_specs(self) -> Params:
        """A `jax.sharding.PartitionSpec` for every weight, or for all in a branch of the tree; the axis of the mesh that
        devices cut is `parallel.AXIS`, "tp"."""
        ...


@runtime_checkable
class MixedModel(Protocol):
    """A `ServedModel` whose layers are of several kinds. Its `layer` takes the layer's kind as `kind=`.

    Layers of one kind are one function of different weights. A kind is a value that can be hashed. All layers of a model of
    one's own have keys and values of the same shapes.
    """

    @property
    def layer_kinds(self) -> tuple[Hashable, ...]:
        """The kind of every layer; () if all are alike."""
        ...

    def layer[KV](
        self,
        params: Weights,
        x: Float[Array, "T E"],
        positions: Int[Array, "T"],
        kv: KV,
        attend: Attend[KV],
        *,
        kind: Any,
    ) -> tuple[Float[Array, "T E"], KV]:
        """As `ServedModel.layer`, of this kind."""
        ...


@runtime_checkable
class WindowedModel(MixedModel, Protocol):
    """A `MixedModel` that says which of its layers see a window of tokens: these may have a smaller pool of their own."""

    def layer_window(self, kind: Any) -> int | None:
        """Tokens that a token sees in layers of this kind, itself and those before it; None: all. Not less than the window of
        the `Scoring` with which such a layer calls `attend`."""
        ...


def windows_of(model: "ServedModel") -> tuple[int | None, ...]:
    """The window of every layer, see `WindowedModel`; () if no layer has one or the model does not say."""
    windows = [*map(model.layer_window, model.layer_kinds)] if isinstance(model, WindowedModel) else []
    return tuple(windows) if any(windows) else ()


@runtime_checkable
class RecurrentModel(MixedModel, Protocol):
    """A `MixedModel` some of whose layers have a state of fixed size for each sequence in place of keys and values.

    Such a layer gets its states as `kv`, an array `[slots, *shape]` for each `StateArray` of its kind, and the `StateRows` of
    the step in the place of `attend`; it returns the states behind the step's tokens. Padding must not change them.
    """

    def layer_states(self, kind: Any) -> tuple[StateArray, ...]:
        """The state of a layer of this kind; () if such layers have keys and values."""
        ...


def states_of(model: "ServedModel") -> tuple[tuple[StateArray, ...], ...]:
    """The state of every layer, see `RecurrentModel`; () if no layer has one."""
    states = [*map(model.layer_states, model.layer_kinds)] if isinstance(model, RecurrentModel) else []
    return tuple(states) if any(states) else ()


@runtime_checkable
class ServedModel(Protocol):
    """A decoder-only model as pure functions, traced under `jax.jit`.

    All layers are one function of different weights, unless the model is a `MixedModel` too. A function must not look at other
    rows of its tokens than through `attend`: a step's tokens belong to many sequences.
    """

    @property
    def config(self) -> ModelDimensions: ...

    def embed(self, params: Weights, tokens: Int[Array, "T"], positions: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Vectors of the tokens at these positions, in the weights' dtype; `params` is `Params.embed`."""
        ...

    def layer[KV](
        self, params: Weights, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        """One layer, x's dtype in and out; calls `attend` once, and returns the `kv` that it returned."""
        ...

    def head(self, params: Weights, x: Float[Array, "R E"]) -> Float32[Array, "R V"]:
        """Logits of the chosen rows; `params` is `Params.head`."""
        ...
