"""The shape of a model, read from a Hugging Face `config.json`.

A config that this package would run wrongly (another architecture, an unknown rope scaling, biases it has no place for)
is refused here, before any weight is read. The same for GGUF metadata is in `gguf_weights.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jinfercept.errors import ModelError

Family = Literal["llama", "gptj"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "factors"]


class Architecture(NamedTuple):
    """What the name of an architecture says that its config does not: the blocks, and what they have beside the plain ones."""

    family: Family
    qkv_bias: bool = False
    qk_norm: bool = False
    always_windowed: bool = False  # `sliding_window` counts even where no `use_sliding_window` says so


ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama", always_windowed=True),
    "qwen2": Architecture("llama", qkv_bias=True),
    "qwen3": Architecture("llama", qk_norm=True),
    "gptj": Architecture("gptj"),
}
"""By `model_type`, and by the name in GGUF files."""
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPTJForCausalLM": "gptj",
}
_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_GPTJ_KEYS = ("vocab_size", "n_embd", "n_layer", "n_head", "rotary_dim", "layer_norm_epsilon", "n_positions")

_BELOW = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1 << 12,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "ffn_size": 1 << 24,
    "max_position": 1 << 31,
}
"""No model has such sizes: a damaged config does."""

_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `rotary_dim` dimensions of a head.

    Pairs are `(i, i + rotary_dim / 2)`, or `(2i, 2i + 1)` if `interleaved`. `factor` belongs to every scaling;
    `low_freq_factor` and `high_freq_factor` to llama3, `beta_fast`, `beta_slow`, `truncate` and `attention_factor`
    (which multiplies cosine and sine) to yarn, `original_max_position` (tokens before the extension) to both; `factors`, one
    per pair, to the scaling of that name.
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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model: everything that shapes its arrays and its arithmetic. Hashable: static in `jax.jit`.

    Attributes:
        max_position: tokens of a sequence: the model's limit, or its sliding window if that is shorter. Attention is full, and
            within the window that is the same.
        qkv_bias: the projections to queries, keys and values have biases (Qwen2).
        qk_norm: queries and keys are normed head by head before they are rotated (Qwen3).
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
    activation: Literal["silu", "gelu_new"]
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name, most in _BELOW.items():
            _check_number(name, getattr(self, name), whole=True, most=most)
        _check_number("norm_eps", self.norm_eps, whole=False)
        for name in ("tie_embeddings", "qkv_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ModelError(
                    f"{name} is true or false", got=repr(getattr(self, name))[:80], fix="correct the config"
                )
        self._check_rope()
        for token_id in self.eos_token_ids:
            _check_number("eos_token_id", token_id, whole=True, least=-1)  # none, of some
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                "query heads must divide evenly among KV heads",
                got=f"{self.num_heads} and {self.num_kv_heads}",
                fix="correct the model's config",
            )

    def _check_rope(self) -> None:
        rope = self.rope
        if type(rope.rotary_dim) is not int or not 0 < rope.rotary_dim <= self.head_dim or rope.rotary_dim % 2:
            raise ModelError(
                "the rotary dimensions are an even number, at most those of a head",
                got=f"{rope.rotary_dim!r}"[:80] + f" of {self.head_dim}",
                fix="correct the model's config",
            )
        _check_number("original_max_position", rope.original_max_position, whole=True, least=0)
        for name in (
            "theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ):
            _check_number(name, getattr(rope, name), whole=False)
        for factor in rope.factors:
            _check_number("a rotary factor", factor, whole=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read a parsed `config.json`, and `generation_config.json` for further end-of-sequence tokens.

        Raises:
            ModelError: the architecture or the rope scaling is unknown, keys are missing, or something is set that
                would change the result and is not implemented.
        """
        if not isinstance(config, Mapping) or not isinstance(generation, Mapping | None):
            raise ModelError(
                "config.json and generation_config.json are JSON objects",
                got=repr(config if generation is None or isinstance(generation, Mapping) else generation)[:80],
                fix="download them again",
            )
        names = config.get("architectures")
        name = str(names[0] if isinstance(names, list) and names else config.get("model_type"))
        architecture = ARCHITECTURES.get(_CLASSES.get(name, name))
        if architecture is None:
            raise ModelError(
                "the model's architecture is not supported", got=name, fix=f"use one of {', '.join(_CLASSES)}"
            )
        try:
            eos = _ids(config.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
            fields = _gptj_fields(config) if architecture.family == "gptj" else _llama_fields(config, architecture)
            return cls(family=architecture.family, eos_token_ids=tuple(dict.fromkeys(eos)), **fields)
        except (TypeError, ArithmeticError) as error:
            raise ModelError(
                "config.json has values of other types than it should",
                got=str(error)[:200],
                fix="correct the file or download it again",
            ) from error


def _llama_fields(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    _require(config, _LLAMA_KEYS, where="config.json")
    _check_numbers(config, _LLAMA_KEYS, ("num_key_value_heads", "head_dim", "sliding_window"))
    _refuse_unless(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    max_position = config["max_position_embeddings"]
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "ffn_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": _llama_rope(config, head_dim, max_position),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": min(max_position, _window(config, architecture) or max_position),
        "activation": "silu",
        "qkv_bias": architecture.qkv_bias,
        "qk_norm": architecture.qk_norm,
    }


def _window(config: Mapping[str, Any], architecture: Architecture) -> int | None:
    """Tokens that a query of a windowed layer sees, itself included; None if all layers see everything."""
    windowed = config.get("use_sliding_window", architecture.always_windowed)
    return config.get("sliding_window") if windowed else None


def _gptj_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, _GPTJ_KEYS, where="config.json")
    _check_numbers(config, _GPTJ_KEYS, ("n_inner",))
    _refuse_unless(config, activation_function="gelu_new")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["n_embd"],
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "head_dim": config["n_embd"] // config["n_head"],
        "ffn_size": config.get("n_inner") or 4 * config["n_embd"],
        "norm_eps": config["layer_norm_epsilon"],
        "rope": RopeConfig(theta=10_000.0, rotary_dim=config["rotary_dim"], interleaved=True),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": config["n_positions"],
        "activation": "gelu_new",
    }


def _llama_rope(config: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`."""
    stated = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    rope = next((value for value in stated if value is not None and value != {}), {})
    if not isinstance(rope, Mapping):
        raise ModelError("rope_parameters of config.json are an object", got=repr(rope)[:80], fix="correct the file")
    _check_rope(rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(
            "Llama with partial rotary embedding is not supported", got=dict(rope), fix="use another model"
        )
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", max_position
    )
    match kind:
        case "default":
            return RopeConfig(theta, head_dim)
        case "linear":
            _require(rope, ("factor",), where="rope_parameters")
            return RopeConfig(theta, head_dim, scaling="linear", factor=rope["factor"])
        case "llama3":
            _require(rope, ("factor", "low_freq_factor", "high_freq_factor"), where="rope_parameters")
            return RopeConfig(
                theta,
                head_dim,
                scaling="llama3",
                factor=rope["factor"],
                original_max_position=original,
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
            )
        case "yarn":
            _require(rope, ("factor",), where="rope_parameters")
            return RopeConfig(
                theta,
                head_dim,
                scaling="yarn",
                factor=rope["factor"],
                original_max_position=original,
                beta_fast=rope.get("beta_fast") or 32.0,
                beta_slow=rope.get("beta_slow") or 1.0,
                truncate=rope.get("truncate", True) is not False,
                attention_factor=_yarn_attention_factor(rope),
            )
        case _:
            raise ModelError("the rope scaling is not supported", got=kind, fix="use default, linear, llama3 or yarn")


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    """YaRN (arXiv 2309.00071), section 3.4: 0.1 ln s + 1, unless the config says otherwise."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def _require(config: Mapping[str, Any], keys: tuple[str, ...], *, where: str) -> None:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ModelError(
            f"{where} lacks keys", got=f"no {', '.join(missing)}", fix="complete the file or use another model"
        )


def _check_number(name: str, value: Any, *, whole: bool, least: int | None = None, most: int = 1 << 31) -> None:
    """Raise `ModelError` unless this is a number above 0, or from `least` on, and below `most`."""
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not (value > 0 if least is None else value >= least) or not value < most:
        kind = "whole number" if whole else "number"
        raise ModelError(
            f"{name} is a {kind} {'above 0' if least is None else f'from {least} on'} and below {most}",
            got=repr(value)[:80],
            fix="correct the model's config or download it again",
        )


def _check_numbers(config: Mapping[str, Any], keys: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Sizes are whole numbers above 0, epsilons numbers above 0; what is optional may be null or 0."""
    for key in (*keys, *(key for key in optional if config.get(key))):
        value, kinds = config[key], (int, float) if key.endswith(("eps", "epsilon")) else (int,)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            kind = "number" if float in kinds else "whole number"
            raise ModelError(
                f"{key} of config.json is a {kind} above 0",
                got=repr(value)[:80],
                fix="correct the file or download it again",
            )


def _check_rope(rope: Mapping[str, Any]) -> None:
    """Whatever number is given is one."""
    for key in _ROPE_NUMBERS:
        value = rope.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
            raise ModelError(
                f"{key} of rope_parameters is a number above 0", got=repr(value)[:80], fix="correct config.json"
            )


def _refuse_unless(config: Mapping[str, Any], **implemented: object) -> None:
    for key, value in implemented.items():
        if config.get(key, value) != value:
            raise ModelError(
                f"{key} of config.json is not supported", got=config[key], fix=f"use a model with {key} = {value}"
            )


def _ids(eos: int | list[int] | None) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
