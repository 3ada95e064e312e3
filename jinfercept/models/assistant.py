"""Which models an assistant drafts for: one that reads the hidden states, keys and values of a larger model (Gemma 4)."""

from dataclasses import replace

from jinfercept.errors import ConfigError
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.protocol import ModelDimensions


def fitted(assistant: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The config of an assistant with the layers of the model for which it drafts: each of its layers reads the last one of
    these that has keys and values of its own and the same window.

    Args:
        target: the larger model, as its devices serve it.

    Raises:
        ConfigError: the checkpoint is no assistant, or one for other models.
    """
    own = assistant.assistant
    if own is None:
        raise ConfigError(
            "the method mtp takes no model but an assistant of Gemma 4",
            got=assistant.family,
            fix='the method draft_model, or "model" left out where the model itself has a layer that drafts',
        )
    if target.family != assistant.family:
        raise _other_target("drafts for models of Gemma 4", f"a served model of {target.family}")
    for name, ours, theirs in (
        ("hidden size", own.target_size, target.hidden_size),
        ("number of tokens", assistant.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise _other_target(f"drafts for models with a {name} of {ours}", theirs)
    kinds = tuple(_fitted_kind(assistant, kind, target) for kind in assistant.kinds)
    return replace(assistant, num_kv_heads=target.num_kv_heads, kinds=kinds)


def is_assistant(config: ModelDimensions) -> bool:
    """Whether a model drafts for another one, and serves nothing alone."""
    return isinstance(config, ModelConfig) and config.assistant is not None


def _fitted_kind(assistant: ModelConfig, kind: LayerKind, target: ModelConfig) -> LayerKind:
    layers = [i for i in range(target.num_layers) if _is_shared(target.kind(i), kind.window)]
    if not layers:
        raise _other_target(f"has a layer with a window of {kind.window}", "a served model without one")
    shared = target.of_kind(target.kind(layers[-1]))
    dims, heads = assistant.of_kind(kind).head_dim, assistant.num_heads
    if dims != shared.head_dim or heads % shared.num_kv_heads:
        got = f"{shared.head_dim} dimensions and {shared.num_kv_heads} KV heads"
        raise _other_target(f"has {heads} heads of {dims} dimensions in layers with a window of {kind.window}", got)
    return kind._replace(kv_from=layers[-1], num_kv_heads=shared.num_kv_heads)


def _is_shared(kind: LayerKind, window: int | None) -> bool:
    return kind.kv_from is None and kind.window == window


def _other_target(what: str, got: object) -> ConfigError:
    return ConfigError(f"the assistant {what}", got=got, fix="take the assistant of the served model")
