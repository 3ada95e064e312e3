"""Reads the rotary embedding of a Llama or a relative of it from a parsed `config.json`, by the rules of transformers 5.

* `rope_scaling`, if it is there and not empty, replaces `rope_parameters` as a whole.
* `rope_theta` in that object comes before the one beside it, then 10,000.
* `original_max_position_embeddings` beside the object comes before the one in it, then `max_position_embeddings`.
* `longrope` is its short factors up to the original length, and `dynamic` no scaling up to `max_position_embeddings`. Longer
  sequences turn by other numbers from their beginning: those of an engine do if its `max_model_len` is above that length, and
  are no longer otherwise. `dynamic` then has the numbers of its longest sequence.
* Phi-3 calls longrope `su` or `yarn`, too.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import ARCHITECTURES, RopeConfig
from jinfercept.models.hf_keys import check_keys, require

log = logging.getLogger("jinfercept")

_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor"),
)
_KEYS = {
    *(*_NUMBERS, "rope_type", "type", "partial_rotary_factor", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "finetuned"),
}
_GROWTH = "llama_4_scaling_beta"
_OF_IMAGES = frozenset(
    ("mrope_section", "mrope_interleaved")
)  # pairs that turn by places in images, which text has none of
_OWN_KEYS = {
    **dict.fromkeys(("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _OF_IMAGES),
    "ministral3": frozenset((_GROWTH, "max_position_embeddings")),  # the model's length again
}
"""Further keys of some architectures that are read or change nothing."""
_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


class Rope(NamedTuple):
    """A rotary embedding and the tokens of the longest sequence that it is right for."""

    config: RopeConfig
    max_position: int


def rope_from_hf(config: Mapping[str, Any], head_dim: int, max_position: int, architecture: str) -> Rope:
    """The rotary embedding.

    Args:
        config: the parsed `config.json`.
        max_position: its `max_position_embeddings`.
        architecture: a name in `ARCHITECTURES`.

    Raises:
        ModelError: the scaling is not supported, or something in it is missing, wrong or not understood.
    """
    rope = _stated(config)
    check_keys(
        rope, _KEYS | _OWN_KEYS.get(architecture, frozenset()), where="the rotary embedding in config.json", every=True
    )
    for key in (*_NUMBERS, _GROWTH):
        value = rope.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
            problem = f"{key} of rope_parameters is a number above 0"
            raise ModelError(problem, got=shown(value), fix="correct config.json")
    share, kind = _rotary_share(config, rope), _kind(rope)
    kind = "longrope" if architecture == "phi3" and kind in ("su", "yarn") else kind
    rotary_dim = head_dim if kind == "proportional" else _rotary_dim(share, head_dim, architecture)
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", max_position
    )
    match kind:
        case "default":
            scaled = RopeConfig(theta, rotary_dim)
        case "linear":
            _require(rope, ("factor",))
            scaled = RopeConfig(theta, rotary_dim, scaling="linear", factor=rope["factor"])
        case "dynamic":
            _require(rope, ("factor",))
            scaled = _dynamic(theta, rotary_dim, rope["factor"], max_position)
        case "proportional":
            pairs, factor = int(share * head_dim // 2), rope.get("factor", 1.0)
            scaled = RopeConfig(theta, head_dim, scaling="proportional", factor=factor, turning_pairs=pairs)
        case "llama3":
            scaled = _llama3(rope, theta, rotary_dim, original)
        case "yarn":
            scaled = _yarn(rope, theta, rotary_dim, original, max_position)
        case "longrope":
            return Rope(_longrope(rope, theta, rotary_dim, original, max_position), min(max_position, original))
        case _:
            raise ModelError(
                "the rope scaling is not supported", got=shown(kind), fix=f"use one of {', '.join(_TYPES)}"
            )
    if rope.get(_GROWTH):
        _require(rope, ("original_max_position_embeddings",))
        scaled = replace(scaled, original_max_position=original, query_growth=rope[_GROWTH])
    return Rope(scaled, max_position)


def ropes_by_layer_type(
    config: Mapping[str, Any], head_dim: int, thetas: tuple[float, float], architecture: str
) -> tuple[Rope, Rope]:
    """The rotations of full layers and of windowed ones. `rope_scaling`, transformers 4's, is of full layers.

    Args:
        config: as for `rope_from_hf`.
        thetas: of both, where the rotations have none.
    """
    stated = config.get("rope_parameters") or {}
    kinds = [stated.get("full_attention") or {}, stated.get("sliding_attention") or {}]
    if scaling := config.get("rope_scaling"):
        kinds[0] = {**kinds[0], **scaling}
    longest = config["max_position_embeddings"]
    full, near = (
        rope_from_hf({"rope_theta": theta, "rope_parameters": kind}, head_dim, longest, architecture)
        for theta, kind in zip(thetas, kinds, strict=True)
    )
    return full, near


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that counts."""
    stated = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) not in (None, {})}
    for key, rope in stated.items():
        if not isinstance(rope, Mapping):
            raise ModelError(f"{key} of config.json is an object", got=shown(rope), fix="correct the file")
    if len(stated) == 2 and stated["rope_scaling"] != stated["rope_parameters"]:
        log.warning(
            "config.json has rope_scaling and rope_parameters: rope_scaling counts, as in transformers, with rope_theta %s",
            stated["rope_scaling"].get("rope_theta", config.get("rope_theta", 10_000.0)),
        )
    return next(iter(stated.values()), {})


def _rotary_share(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """`partial_rotary_factor`. Raises `ModelError` if it is no part of a head."""
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None:
        return 1.0
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ModelError(
            "partial_rotary_factor is a number above 0, at most 1", got=shown(share), fix="correct config.json"
        )
    return share


def _rotary_dim(share: float, head_dim: int, architecture: str) -> int:
    """The dimensions of a head that turn."""
    if share == 1:
        return head_dim
    if not ARCHITECTURES[architecture].turns_partly:
        raise ModelError(
            "partial_rotary_factor of config.json is not supported: transformers turns whole heads whatever it is",
            got=shown(share),
            fix="use another model, or remove it if the model turns whole heads",
        )
    return int(head_dim * share)


def _dynamic(theta: float, rotary_dim: int, factor: float, max_position: int) -> RopeConfig:
    """No scaling, and for `ModelConfig.for_length` the base of sequences that are longer by the factor."""
    half, longest = rotary_dim // 2, int(max_position * factor)
    scaled = RopeConfig(theta, rotary_dim)
    if longest <= max_position:
        return scaled
    growth = factor * longest / max_position - (factor - 1)
    exponents = [2 * pair / (rotary_dim - 2) for pair in range(half)]
    long = tuple(growth**exponent for exponent in exponents)
    return replace(scaled, scaling="factors", factors=(1.0,) * half, long_factors=long, long_max_position=longest)


def _llama3(rope: Mapping[str, Any], theta: float, rotary_dim: int, original: int) -> RopeConfig:
    _require(rope, ("factor", "low_freq_factor", "high_freq_factor"))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if low >= high:
        raise ModelError(
            "high_freq_factor is above low_freq_factor", got=f"{high} and {low}", fix="correct config.json"
        )
    return RopeConfig(
        theta,
        rotary_dim,
        scaling="llama3",
        factor=rope["factor"],
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Mapping[str, Any], theta: float, rotary_dim: int, original: int, max_position: int) -> RopeConfig:
    if "factor" not in rope:
        _require(rope, ("factor",))
    factor = max_position / original if rope["factor"] is None else rope["factor"]
    return RopeConfig(
        theta,
        rotary_dim,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv 2309.00071), section 3.4: 0.1 ln s + 1, unless the config says otherwise."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(rope: Mapping[str, Any], theta: float, rotary_dim: int, original: int, max_position: int) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753): the short factors, and the long ones for `ModelConfig.for_length`."""
    _require(rope, ("short_factor", "long_factor"))
    for name in ("short_factor", "long_factor"):
        if not isinstance(rope[name], list) or len(rope[name]) != rotary_dim // 2:
            raise ModelError(
                f"{name} of longrope has {rotary_dim // 2} numbers", got=shown(rope[name]), fix="correct config.json"
            )
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    factor = max_position / original if factor is None else factor
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = tuple(rope["short_factor"]), tuple(rope["long_factor"])
    scaled = RopeConfig(theta, rotary_dim, scaling="factors", factors=short, attention_factor=attention)
    return replace(scaled, long_factors=long, long_max_position=max_position) if max_position > original else scaled


def _require(rope: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    require(rope, keys, where=f"the rotary embedding of type {_kind(rope)} in config.json")


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
