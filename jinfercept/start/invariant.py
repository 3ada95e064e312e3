"""`batch_invariant`: what a start settles so that log probabilities have the same bits whatever runs beside a request."""

from dataclasses import replace

import jax

from jinfercept.config import EngineConfig
from jinfercept.cpu_kernels.ordered_attention import fewest_rows
from jinfercept.errors import refuse_any
from jinfercept.models.config import ModelConfig
from jinfercept.models.load import dtype_name
from jinfercept.models.protocol import Params, ServedModel, states_of
from jinfercept.models.quantized import is_quantized


def as_invariant(config: EngineConfig, model: ServedModel, params: Params) -> EngineConfig:
    """The options with which a model is served: with `batch_invariant`, attention is `ordered`.

    Raises:
        ConfigError: the bits would depend on the batch with another option, with this model or on these devices.
    """
    advanced = config.advanced
    if not advanced.batch_invariant:
        return config
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    own = model.config
    experts, sinks = (own.experts is not None, own.sinks) if isinstance(own, ModelConfig) else (False, False)
    refuse_any(
        "batch_invariant cannot be combined with this option",
        (jax.default_backend() != "cpu", f"JAX on a {jax.default_backend()}", "JAX_PLATFORMS=cpu"),
        (dtype_name(config.model.dtype) != "float32", f"dtype={config.model.dtype}", "dtype=float32"),
        (any(map(is_quantized, leaves)), "quantised weights", "quantization=none"),
        (config.model.activation_dtype != "auto", f"activation_dtype={config.model.activation_dtype}", "auto"),
        (config.cache.kv_cache_dtype != "auto", f"kv_cache_dtype={config.cache.kv_cache_dtype}", "auto"),
        (len(leaves[0].sharding.device_set) > 1, "several devices", "one device"),
        (config.scheduling.speculation.num_speculative_tokens > 0, "speculative_config", "no drafts"),
        (experts, "a model with experts", "another model"),
        (sinks, "a model with attention sinks", "another model"),
        (bool(states_of(model)), "a model with recurrent layers", "another model"),
        (advanced.attention not in ("auto", "ordered"), f"attention={advanced.attention}", "attention=auto"),
        (
            config.scheduling.max_num_batched_tokens < fewest_rows(own.hidden_size),
            f"max_num_batched_tokens={config.scheduling.max_num_batched_tokens}",
            f"at least {fewest_rows(own.hidden_size)}",
        ),
    )
    return replace(config, advanced=replace(advanced, attention="ordered"))
