"""Reads the rotary embedding of a Llama or a relative of it from a parsed `config.json`, by the rules of transformers 5.

* `rope_scaling`, if it is there and not empty, replaces `rope_parameters` as a whole.
* `rope_theta` in that object comes before the one beside it, then 10,000.
* `original_max_position_embeddings` beside the object comes before the one in it, then `max_position_embeddings`.
* `dynamic` is no scaling up to `max_position_embeddings`, and `longrope` is its short factors up to the original length:
  sequences are no longer than that.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import RopeConfig
from jinfercept.models.hf_keys import check_keys, require

log = logging.getLogger("jinfercept")

_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)
_KEYS = {
    *(*_NUMBERS, "rope_type", "type", "partial_rotary_factor", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "finetuned"),
}
_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


class Rope(NamedTuple):
    """A rotary embedding and the tokens of the longest sequence that it is right for."""

    config: RopeConfig
    max_position: int


def rope_from_hf(config: Mapping[str, Any], head_dim: int, max_position: int) -> Rope:
    """The rotary embedding of whole heads.

    Args:
        config: the parsed `config.json`.
        max_position: its `max_position_embeddings`.

    Raises:
        ModelError: the scaling is not supported, or something in it is missing, wrong or not understood.
    """
    rope = _stated(config)
    check_keys(rope, _KEYS, where="the rotary embedding in config.json", every=True)
    _check_numbers(rope)
    _refuse_partial(config, rope)
    kind = _kind(rope)
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", max_position
    )
    match kind:
        case "default":
            scaled = RopeConfig(theta, head_dim)
        case "linear":
            _require(rope, ("factor",))
            scaled = RopeConfig(theta, head_dim, scaling="linear", factor=rope["factor"])
        case "dynamic":
            _require(rope, ("factor",))
            scaled = RopeConfig(theta, head_dim)
        case "llama3":
            scaled = _llama3(rope, theta, head_dim, original)
        case "yarn":
            scaled = _yarn(rope, theta, head_dim, original, max_position)
        case "longrope":
            return Rope(_longrope(rope, theta, head_dim, original, max_position), min(max_position, original))
        case _:
            raise ModelError(
                "the rope scaling is not supported", got=shown(kind), fix=f"use one of {', '.join(_TYPES)}"
            )
    return Rope(scaled, max_position)


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


def _refuse_partial(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ModelError(
            "partial_rotary_factor of config.json is not supported: transformers turns whole heads whatever it is",
            got=shown(share),
            fix="use another model, or remove it if the model turns whole heads",
        )


def _llama3(rope: Mapping[str, Any], theta: float, head_dim: int, original: int) -> RopeConfig:
    _require(rope, ("factor", "low_freq_factor", "high_freq_factor"))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if low >= high:
        raise ModelError(
            "high_freq_factor is above low_freq_factor", got=f"{high} and {low}", fix="correct config.json"
        )
    return RopeConfig(
        theta,
        head_dim,
        scaling="llama3",
        factor=rope["factor"],
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Mapping[str, Any], theta: float, head_dim: int, original: int, max_position: int) -> RopeConfig:
    if "factor" not in rope:
        _require(rope, ("factor",))
    factor = max_position / original if rope["factor"] is None else rope["factor"]
    return RopeConfig(
        theta,
        head_dim,
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


def _longrope(rope: Mapping[str, Any], theta: float, head_dim: int, original: int, max_position: int) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753) of sequences within the original length."""
    _require(rope, ("short_factor", "long_factor"))
    short = rope["short_factor"]
    if not isinstance(short, list) or len(short) != head_dim // 2:
        raise ModelError(
            f"short_factor of longrope has {head_dim // 2} numbers", got=shown(short), fix="correct config.json"
        )
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    factor = max_position / original if factor is None else factor
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(theta, head_dim, scaling="factors", factors=tuple(short), attention_factor=attention)


def _require(rope: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    require(rope, keys, where=f"the rotary embedding of type {_kind(rope)} in config.json")


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _check_numbers(rope: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a value that should be a number above 0 and is not."""
    for key in _NUMBERS:
        value = rope.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
            raise ModelError(
                f"{key} of rope_parameters is a number above 0", got=shown(value), fix="correct config.json"
            )
