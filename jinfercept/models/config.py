"""`ModelConfig`: the shape of a model. `hf_config.py` and `gguf_config.py` read it from files."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jinfercept.errors import ModelError, shown
from jinfercept.pallas.layouts.rows import Activation

Family = Literal["llama", "gptj", "gemma", "gemma4", "qwen3_next", "nemotron_h"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "factors", "proportional"]


class Architecture(NamedTuple):
    """Facts that the name of an architecture implies and its config does not state: the blocks and their extra parts.

    Attributes:
        parts: fields of `ModelConfig` with values of their own.
        always_windowed: `sliding_window` counts even where no `use_sliding_window` says so.
        turns_partly: `partial_rotary_factor` counts.
        fused: queries, keys and values are stored as one tensor, and so are gate and up.
        has_experts: its feed-forward networks are experts, unless the config says otherwise.
        keys: of `config.json` that say what its class does anyway, or what is read though the class has no field for it.
    """

    family: Family
    parts: Mapping[str, bool] = MappingProxyType({})
    always_windowed: bool = False
    turns_partly: bool = False
    fused: bool = False
    has_experts: bool = False
    keys: tuple[str, ...] = ()


_GATED = {"qk_norm": True, "attention_gate": True}
_NORMED_OUTPUTS = {"pre_norms": False, "post_norms": True, "qk_row_norm": True}
_RECURRENT = Architecture(
    "qwen3_next",
    _GATED,
    turns_partly=True,
    keys=(
        *("full_attention_interval", "attn_output_gate", "mamba_ssm_dtype"),  # states are float32
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # of the layer that drafts
    ),
)
_WINDOWS = ("sliding_window_pattern", "rope_local_base_freq")
ASSISTANT_KEYS = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
"""Of models that draft for others, beside the part that reads text."""
ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama", always_windowed=True),
    "ministral3": Architecture("llama", always_windowed=True),
    "qwen2": Architecture("llama", {"qkv_bias": True}),
    "qwen3": Architecture("llama", {"qk_norm": True}, keys=("use_qk_norm",)),
    "olmo2": Architecture("llama", _NORMED_OUTPUTS),
    "olmo3": Architecture("llama", _NORMED_OUTPUTS),
    "phi3": Architecture("llama", always_windowed=True, turns_partly=True, fused=True),
    "granite": Architecture("llama"),
    "smollm3": Architecture("llama"),
    "gemma": Architecture("gemma"),
    "mixtral": Architecture("llama", always_windowed=True, has_experts=True),
    "qwen3_moe": Architecture(
        "llama", {"qk_norm": True}, always_windowed=True, has_experts=True, keys=("use_qk_norm",)
    ),
    "gpt_oss": Architecture("llama", {"sinks": True}, has_experts=True),
    "glm4_moe": Architecture("llama", {"o_bias": False}, turns_partly=True, has_experts=True),
    "qwen3_next": _RECURRENT._replace(has_experts=True),
    "qwen3_5_text": _RECURRENT,
    "qwen3_5_moe_text": _RECURRENT._replace(has_experts=True),
    "nemotron_h": Architecture(
        "nemotron_h",
        has_experts=True,
        keys=(
            *("hybrid_override_pattern", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
            *("num_hidden_layers", "norm_eps", "rms_norm_eps"),
        ),
    ),
    "gemma2": Architecture("gemma", {"post_norms": True}, keys=_WINDOWS),
    "gemma3_text": Architecture("gemma", {"qk_norm": True, "post_norms": True}, keys=_WINDOWS),
    "gemma4_text": Architecture(
        "gemma4",
        {"qk_norm": True, "post_norms": True},
        has_experts=True,
        keys=("global_head_dim", "num_global_key_value_heads", *ASSISTANT_KEYS),
    ),
    "gptj": Architecture("gptj"),
}
"""By `model_type`."""
_BELOW = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1 << 12,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position": 1 << 31,
    "ffn_size": 1 << 24,
    "shared_ffn_size": 1 << 24,
    "latent_size": 1 << 20,
    **dict.fromkeys(("num_experts", "per_token", "parts"), 1 << 12),
    **dict.fromkeys(("num_key_heads", "num_value_heads", "key_dim", "value_dim"), 1 << 16),
    "num_taps": 1 << 10,
}
"""No model has such sizes: a damaged config does."""
_DIMENSIONS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
_LEAST = {
    **dict.fromkeys(
        (
            "shared_ffn_size",
            "latent_size",
            "per_layer_size",
            "original_max_position",
            "turning_pairs",
            "long_max_position",
            "query_growth",
            "num_clusters",
            "likely_clusters",
        ),
        0,
    ),
    "num_taps": 2,
}
"""Of numbers that need not be above 0, or have to be more than 1."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `rotary_dim` dimensions of a head.

    Pairs are `(i, i + rotary_dim / 2)`, or `(2i, 2i + 1)` if `interleaved`. `factor` belongs to every scaling;
    `low_freq_factor` and `high_freq_factor` to llama3, `beta_fast`, `beta_slow` and `truncate` to yarn,
    `original_max_position` (tokens before the extension) to both; `factors`, one per pair, to the scaling of that name; of the
    pairs of `proportional` only the first `turning_pairs` turn. `attention_factor` multiplies cosine and sine. With
    `long_factors` in place of `factors` sequences have up to `long_max_position` tokens, see `ModelConfig.for_length`. Queries
    are multiplied by `1 + query_growth · ln(1 + ⌊position / original_max_position⌋)` (Ministral 3; Llama 4 has it too).
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    turning_pairs: int = 0
    long_factors: tuple[float, ...] = ()
    long_max_position: int = 0
    query_growth: float = 0.0

    def scoring(self, query_scale: float) -> "RopeConfig":
        """The rotation of whole heads with which attention that divides scores by the root of their size multiplies them by
        `query_scale` instead: both a query and its key turn longer or shorter."""
        return replace(self, attention_factor=self.attention_factor * (query_scale * self.rotary_dim**0.5) ** 0.5)


class LayerKind(NamedTuple):
    """What a layer has that others of its model may not have.

    Attributes:
        window: a token sees so many tokens, itself and those before it; None: all before it.
        rope: the rotation of its queries and keys; None: that of the model.
        is_dense: its feed-forward network is one, though the model has experts.
        is_recurrent: it has a state in place of attention, see `DeltaNetConfig`.
        head_dim, num_kv_heads, ffn_size: of the layer; None: those of the model.
        keys_are_values: its values are its keys before these are normed and rotated, and it has no weights for them.
        kv_from: another layer of the same sizes whose keys and values it reads; None: it has its own. Of an assistant, a layer
            of the model for which it drafts, see `assistant.fitted`.
        drafts: it comes behind the last layer and drafts tokens, see `ModelConfig.with_draft_layer`.
        has_mixer: it has attention or a state; one without (Nemotron-H) names a layer with attention in `kv_from`, and leaves
            what that has as it is.
        has_ffn: it has a feed-forward network, or experts; some of Nemotron-H's have none.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    is_dense: bool = False
    is_recurrent: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    ffn_size: int | None = None
    keys_are_values: bool = False
    kv_from: int | None = None
    drafts: bool = False
    has_mixer: bool = True
    has_ffn: bool = True


PLAIN_KIND = LayerKind()
_LAYER_SIZES = ("head_dim", "num_kv_heads", "ffn_size")


@dataclass(frozen=True)
class ExpertsConfig:
    """A feed-forward network of experts (`experts.py`).

    Attributes:
        num_experts: of a layer.
        per_token: experts that compute a token.
        ffn_size: columns of each.
        normalised: whether the factors of a token's experts are divided by their sum.
        swiglu: the limit of gates and ups, and the factor within the sigmoid (gpt-oss); None: outputs are `silu(gate) * up`.
        biased: whether the router and the experts have biases (gpt-oss).
        parts: into which each expert is cut, so that several devices have as many parts each.
        shared_ffn_size: columns of a further expert that computes every token, times a gate (Qwen3-Next); 0: there is none.
        scale: of the factors, where scores are sigmoids, a correction is added to them to choose, and the further expert has no
            gate (GLM 4.5); None: scores are probabilities.
        activation: of the gates, or of experts without gates, see `Activation`.
        latent_size: width of what experts read and write, between two projections (Nemotron 3 Super); 0: that of the stream.
    """

    num_experts: int
    per_token: int
    ffn_size: int
    normalised: bool
    swiglu: tuple[float, float] | None = None
    biased: bool = False
    parts: int = 1
    shared_ffn_size: int = 0
    scale: float | None = None
    activation: Activation = "silu"
    latent_size: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        for number in self.swiglu or ():
            _check_number("a number of swiglu", number, whole=False)
        if self.per_token > self.num_experts:
            raise ModelError(
                "a token cannot use more experts than there are",
                got=f"{self.per_token} of {self.num_experts}",
                fix="correct the model's config",
            )


@dataclass(frozen=True)
class DeltaNetConfig:
    """Recurrent layers with a gated delta rule (`qwen3_next.py`), or with Mamba-2's recurrence (`nemotron_h.py`).

    Attributes:
        num_key_heads: heads of queries and keys; Mamba-2's groups.
        num_value_heads: heads of values, as many for each key head; Mamba-2's heads.
        key_dim, value_dim: dimensions of a head; the size of Mamba-2's state, and of its heads.
        num_taps: tokens that the convolution before the rule sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                "value heads of recurrent layers must divide evenly among key heads",
                got=f"{self.num_value_heads} and {self.num_key_heads}",
                fix="correct the model's config",
            )

    @property
    def group(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Numbers of a key head that the convolution sees: query, key, and values."""
        return 2 * self.key_dim + self.group * self.value_dim


@dataclass(frozen=True)
class AssistantConfig:
    """A model that drafts for a larger one, whose hidden states, keys and values it reads (`runner/draft_layer.py`).

    Attributes:
        target_size: hidden size of the larger model.
        num_clusters: groups of as many tokens each, into which the vocabulary is cut; 0: it is not cut.
        likely_clusters: of these, the clusters whose tokens have logits.
    """

    target_size: int
    num_clusters: int = 0
    likely_clusters: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model: everything that shapes its arrays and its arithmetic. Hashable, so it is static in `jax.jit`.

    Attributes:
        max_position: tokens of the longest sequence.
        qkv_bias: the projections to queries, keys and values have biases (Qwen2).
        o_bias: so has the projection of what attention gives.
        mlp_bias: so have the projections of the gated feed-forward network.
        qk_norm: queries and keys are normed head by head before they are rotated (Qwen3).
        qk_row_norm: they are normed over all heads at once (OLMo 2 and 3).
        pre_norms: what goes into attention and into the feed-forward network is normed.
        post_norms: so is what comes out of them, before it is added to the stream.
        embedding_multiplier: of the vectors of tokens (Granite).
        residual_multiplier: of what attention and the feed-forward network add to the stream (Granite).
        logits_divisor: of the logits (Granite).
        kinds: of every layer; () if all are of the plain kind.
        query_scale: of the scores, if it is not one over the root of `head_dim` (Gemma).
        soft_cap: of the scores, see `Scoring` (Gemma 2).
        logit_cap: the same of the logits (Gemma 2).
        sinks: attention has a sink for each query head, see `Scoring` (gpt-oss).
        experts: of the feed-forward network (Mixtral, Qwen3-MoE, gpt-oss); None: it has none.
        attention_gate: what attention gives is multiplied by gates, which are projected beside the queries (Qwen3-Next).
        delta_net: of the recurrent layers (Qwen3-Next, Nemotron-H); None: there are none.
        per_layer_size: numbers of a token that each layer has for itself (Gemma 4 E2B and E4B); 0: there are none.
        assistant: of a model that drafts for another one and serves nothing alone (Gemma 4); None: it is none.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    activation: Activation
    qkv_bias: bool = False
    qk_norm: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_row_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    kinds: tuple[LayerKind, ...] = ()
    query_scale: float | None = None
    soft_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    experts: ExpertsConfig | None = None
    attention_gate: bool = False
    delta_net: DeltaNetConfig | None = None
    per_layer_size: int = 0
    assistant: AssistantConfig | None = None

    @property
    def norms_plus_one(self) -> bool:
        """Norms multiply by one plus their weight, in float32 (Gemma, Qwen3-Next)."""
        return self.family in ("gemma", "qwen3_next")

    def kind(self, layer: int) -> LayerKind:
        """The kind of a layer."""
        return self.kinds[layer] if self.kinds else PLAIN_KIND

    def of_kind(self, kind: LayerKind) -> "ModelConfig":
        """The config with the sizes of the layers of a kind."""
        sizes = {name: size for name in _LAYER_SIZES if (size := getattr(kind, name)) is not None}
        return replace(self, **sizes, rope=kind.rope or self.rope, kinds=()) if sizes else self

    @property
    def num_kv_layers(self) -> int:
        """Layers that have keys and values of their own: all that are not recurrent and do not read another layer's."""
        return self.num_layers - sum(kind.is_recurrent or kind.kv_from is not None for kind in self.kinds)

    @property
    def num_draft_layers(self) -> int:
        """Layers behind the last one that the model itself does not compute: they draft."""
        return sum(kind.drafts for kind in self.kinds)

    def with_draft_layer(self) -> "ModelConfig":
        """The config with a layer behind the last one that predicts the token after the next. Raises `ModelError` for a family
        of which no such layer is known."""
        if self.family != "qwen3_next":
            raise ModelError(
                "the model's family has no layer that drafts (mtp)",
                got=self.family,
                fix="another method of speculative_config",
            )
        return replace(self, num_layers=self.num_layers + 1, kinds=(*self.kinds, LayerKind(drafts=True)))

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """The config for sequences of up to so many tokens. All positions turn by the long factors where that is more than
        `max_position`, as in vLLM: what is cached of a short sequence stays right when it becomes long."""
        rope = self.rope
        if not rope.long_factors or max_model_len is None or max_model_len <= self.max_position:
            return self
        return replace(
            self, max_position=rope.long_max_position, rope=replace(rope, factors=rope.long_factors, long_factors=())
        )

    def __post_init__(self) -> None:
        check_dimensions(self)
        _check_fields(self)
        self._check_kinds()
        self._check_rope(self.rope)

    def _check_kinds(self) -> None:
        if len(self.kinds) not in (0, self.num_layers):
            raise ModelError(
                "kinds must have an entry for every layer, or none",
                got=f"{len(self.kinds)} kinds of {self.num_layers} layers",
                fix="correct the config",
            )
        for kind in set(self.kinds):
            if kind.window is not None:
                _check_number("a window", kind.window, whole=True)
            if kind.rope is not None:
                self.of_kind(kind)._check_rope(kind.rope)
        mixers = [kind for kind in self.kinds or (PLAIN_KIND,) if kind.has_mixer]
        if {kind.is_recurrent for kind in mixers} != {False, self.delta_net is not None}:
            raise ModelError(
                "a model with sizes of recurrent layers has layers with attention and recurrent ones",
                got=shown(self.kinds),
                fix="correct layer_types of the config",
            )

    def _check_rope(self, rope: RopeConfig) -> None:
        if type(rope.rotary_dim) is not int or not 0 < rope.rotary_dim <= self.head_dim or rope.rotary_dim % 2:
            raise ModelError(
                "the number of rotary dimensions must be even and at most that of a head",
                got=f"{rope.rotary_dim!r}"[:80] + f" of {self.head_dim}",
                fix="correct the model's config",
            )
        _check_fields(rope)
        for factor in (*rope.factors, *rope.long_factors):
            _check_number("a rotary factor", factor, whole=False)


def check_dimensions(config: Any) -> None:
    """Raise `ModelError` for a size, or a token that ends texts, that no model can have; of a config with these attributes."""
    for name in _DIMENSIONS:
        _check_number(name, getattr(config, name), whole=True)
    for token_id in config.eos_token_ids:
        _check_number("eos_token_id", token_id, whole=True, least=-1)  # none, of some
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            "query heads must divide evenly among KV heads",
            got=f"{config.num_heads} and {config.num_kv_heads}",
            fix="correct the model's config",
        )


def check_num_layers(count: Any) -> None:
    """Raise `ModelError` unless a model can have so many layers: before there is something for each of them."""
    _check_number("num_layers", count, whole=True)


def _check_fields(config: Any) -> None:
    """Raise `ModelError` for a number of a config that is none, or too small or large, or a flag that is none."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is bool and not isinstance(value, bool):
            raise ModelError(f"{field.name} is true or false", got=shown(value), fix="correct the config")
        if field.type in (int, float) or (field.type == float | None and value is not None):
            _check_number(field.name, value, whole=field.type is int)


def _check_number(name: str, value: Any, *, whole: bool, least: int | None = None) -> None:
    """Raise `ModelError` unless this is a number above 0, or from `least` on, and below what is usual."""
    least, most = _LEAST.get(name, least), _BELOW.get(name, 1 << 31)
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not (value > 0 if least is None else value >= least) or not value < most:
        kind = "whole number" if whole else "number"
        raise ModelError(
            f"{name} is a {kind} {'above 0' if least is None else f'from {least} on'} and below {most}",
            got=shown(value),
            fix="correct the model's config or download it again",
        )
