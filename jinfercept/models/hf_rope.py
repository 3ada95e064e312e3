"""Reads the rotary embedding of a Llama or a relative of it from `rope_parameters`, as transformers makes them of any config.

`longrope` is its short factors up to the original length, and `dynamic` no scaling up to `max_position_embeddings`. Longer
sequences turn by other numbers from their beginning. All sequences of an engine do if its `max_model_len` is above that length,
and `dynamic` then has the numbers of the longest; otherwise none is longer.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import ARCHITECTURES, RopeConfig
from jinfercept.models.hf_keys import check_keys, check_numbers, require

log = logging.getLogger("jinfercept")

_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor"),
)
_KEYS = {
    *(*_NUMBERS, "rope_type", "type", "partial_rotary_factor", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "finetuned"),
}
_GROWTH, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
BY_LAYER_TYPE = ("gemma3_text", "gemma4_text", "olmo3")
"""Architectures whose layers with a window may turn in another way than the others."""
_OF_IMAGES = frozenset(
    ("mrope_section", "mrope_interleaved")
)  # pairs that turn by places in images, which text has none of
_OWN_KEYS = {
    **dict.fromkeys(("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _OF_IMAGES),
    "ministral3": frozenset((_GROWTH, "max_position_embeddings")),  # the model's length again
}
"""Further keys of some architectures that are read or change nothing."""
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Keys that have to be there, by the types that are served."""


class Rope(NamedTuple):
    """A rotary embedding and the tokens of the longest sequence that it is right for."""

    config: RopeConfig
    max_position: int


def ropes_from_hf(
    config: Mapping[str, Any], head_dim: int, architecture: str, near_dim: int | None = None
) -> tuple[Rope, RopeConfig | None]:
    """The rotary embedding of a `config.json` that transformers filled up, and that of layers with a window if it differs.

    `architecture` is a name in `ARCHITECTURES`, `near_dim` the head dim of layers with a window if it is another one. Raises
    `ModelError` if the scaling is not supported, or something in it is missing, wrong or not understood.
    """
    stated, longest = config.get("rope_parameters") or {}, config["max_position_embeddings"]
    if architecture not in BY_LAYER_TYPE:
        original = config.get("original_max_position_embeddings")  # comes before that in the object
        return _rope({**stated, **({_ORIGINAL: original} if original else {})}, head_dim, longest, architecture), None
    dims = {"full_attention": head_dim, "sliding_attention": near_dim or head_dim}
    check_keys(
        stated,
        dims.keys(),
        where="rope_parameters of config.json, which has an object for each type of layer,",
        every=True,
    )
    full, near = (_rope(stated.get(kind) or {}, dim, longest, architecture) for kind, dim in dims.items())
    return full, None if near.config == full.config else near.config


def _rope(rope: Mapping[str, Any], head_dim: int, max_position: int, architecture: str) -> Rope:
    check_keys(
        rope, _KEYS | _OWN_KEYS.get(architecture, frozenset()), where="the rotary embedding in config.json", every=True
    )
    check_numbers(rope, [key for key in (*_NUMBERS, _GROWTH) if rope.get(key) is not None], whole=False)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _NEEDED:
        raise ModelError("the rope scaling is not supported", got=shown(kind), fix=f"use one of {', '.join(_NEEDED)}")
    needed = [*_NEEDED[kind], *[_ORIGINAL] * bool(rope.get(_GROWTH))]
    require(rope, needed, where=f"the rotary embedding of type {kind} in config.json")
    share = _rotary_share(rope)
    rotary_dim = head_dim if kind == "proportional" else _rotary_dim(share, head_dim, architecture)
    plain, original = RopeConfig(rope.get("rope_theta") or 10_000.0, rotary_dim), rope.get(_ORIGINAL) or max_position
    match kind:
        case "linear":
            plain = replace(plain, scaling="linear", factor=rope["factor"])
        case "dynamic":
            plain = _dynamic(plain, rope["factor"], max_position)
        case "proportional":
            pairs = int(share * head_dim // 2)
            plain = replace(plain, scaling="proportional", factor=rope.get("factor", 1.0), turning_pairs=pairs)
        case "llama3":
            plain = _llama3(plain, rope, original)
        case "yarn":
            plain = _yarn(plain, rope, original, max_position)
        case "longrope":
            return Rope(_longrope(plain, rope, original, max_position), min(max_position, original))
    if rope.get(_GROWTH):
        plain = replace(plain, original_max_position=original, query_growth=rope[_GROWTH])
    return Rope(plain, max_position)


def check_rope_objects(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a rotary embedding that is no object, and warn of two, of which transformers takes one."""
    stated = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) not in (None, {})}
    for key, rope in stated.items():
        if not isinstance(rope, Mapping):
            raise ModelError(f"{key} of config.json is an object", got=shown(rope), fix="correct the file")
    if len(stated) == 2 and stated["rope_scaling"] != stated["rope_parameters"]:
        log.warning("config.json has rope_scaling and rope_parameters: rope_scaling counts, as in transformers")


def _rotary_share(rope: Mapping[str, Any]) -> float:
    share = rope.get("partial_rotary_factor")
    if share is None:
        return 1.0
    check_numbers(rope, ("partial_rotary_factor",), whole=False)
    if share > 1:
        raise ModelError(
            "partial_rotary_factor is a number above 0, at most 1", got=shown(share), fix="correct config.json"
        )
    return share


def _rotary_dim(share: float, head_dim: int, architecture: str) -> int:
    if share == 1:
        return head_dim
    if not ARCHITECTURES[architecture].turns_partly:
        raise ModelError(
            "partial_rotary_factor of config.json is not supported: transformers turns whole heads whatever it is",
            got=shown(share),
            fix="use another model, or remove it if the model turns whole heads",
        )
    return int(head_dim * share)


def _dynamic(plain: RopeConfig, factor: float, max_position: int) -> RopeConfig:
    """No scaling, and for `ModelConfig.for_length` the base of sequences that are longer by the factor."""
    half, longest = plain.rotary_dim // 2, int(max_position * factor)
    if longest <= max_position:
        return plain
    growth = factor * longest / max_position - (factor - 1)
    long = tuple(growth ** (2 * pair / (plain.rotary_dim - 2)) for pair in range(half))
    return replace(plain, scaling="factors", factors=(1.0,) * half, long_factors=long, long_max_position=longest)


def _llama3(plain: RopeConfig, rope: Mapping[str, Any], original: int) -> RopeConfig:
    scaled = replace(
        plain, scaling="llama3", original_max_position=original, **{key: rope[key] for key in _NEEDED["llama3"]}
    )
    if scaled.low_freq_factor >= scaled.high_freq_factor:
        got = f"{scaled.high_freq_factor} and {scaled.low_freq_factor}"
        raise ModelError("high_freq_factor is above low_freq_factor", got=got, fix="correct config.json")
    return scaled


def _yarn(plain: RopeConfig, rope: Mapping[str, Any], original: int, max_position: int) -> RopeConfig:
    if "factor" not in rope:
        require(rope, ("factor",), where="the rotary embedding of type yarn in config.json")
    factor = max_position / original if rope["factor"] is None else rope["factor"]
    return replace(
        plain,
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


def _longrope(plain: RopeConfig, rope: Mapping[str, Any], original: int, max_position: int) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753): the short factors, and the long ones for `ModelConfig.for_length`."""
    half = plain.rotary_dim // 2
    for name in _NEEDED["longrope"]:
        if not isinstance(rope[name], list) or len(rope[name]) != half:
            raise ModelError(f"{name} of longrope has {half} numbers", got=shown(rope[name]), fix="correct config.json")
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    factor = max_position / original if factor is None else factor
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaled = replace(plain, scaling="factors", factors=tuple(rope["short_factor"]), attention_factor=attention)
    if max_position <= original:
        return scaled
    return replace(scaled, long_factors=tuple(rope["long_factor"]), long_max_position=max_position)
