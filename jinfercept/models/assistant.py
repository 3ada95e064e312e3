"""Which models an assistant drafts for: one that reads the hidden states, keys and values of a larger model (Gemma 4)."""

from dataclasses import replace

from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.protocol import ModelDimensions


def is_assistant(config: ModelDimensions) -> bool:
    """Whether a model drafts for another one, and serves nothing alone."""
    return isinstance(config, ModelConfig) and config.assistant is not None


def check_alone(config: ModelDimensions) -> None:
    """Raise `ModelError` for an assistant, which is not served alone."""
    if is_assistant(config):
        fix = 'name it as "model" of speculative_config with the method mtp, and serve the model for which it drafts'
        raise ModelError("an assistant drafts for a Gemma 4, and serves nothing alone", got="an assistant", fix=fix)


def fitted(assistant: ModelDimensions, target: ModelDimensions) -> ModelConfig:
    """The config of an assistant with the layers of the model for which it drafts: each of its layers reads the last one of
    these that has keys and values of its own and the same window.

    Args:
        target: the larger model, as its devices serve it.

    Raises:
        ConfigError: the checkpoint is no assistant, or one for other models.
    """
    if not isinstance(assistant, ModelConfig) or assistant.assistant is None or not isinstance(target, ModelConfig):
        raise _other_models("a model of Gemma 4", f"{assistant.family} for a model of {target.family}")
    expected, served = (
        f"a {sizes[0]} of {sizes[1]} dimensions and {sizes[2]} tokens"
        for sizes in (
            (assistant.family, assistant.assistant.target_size, assistant.vocab_size),
            (target.family, target.hidden_size, target.vocab_size),
        )
    )
    if served != expected:
        raise _other_models(expected, served)
    kinds = tuple(_fitted_kind(assistant, kind, target) for kind in assistant.kinds)
    return replace(assistant, num_kv_heads=target.num_kv_heads, kinds=kinds)


def _fitted_kind(assistant: ModelConfig, kind: LayerKind, target: ModelConfig) -> LayerKind:
    of_kind = [i for i, served in enumerate(target.kinds) if served.kv_from is None and served.window == kind.window]
    if not of_kind:
        raise _other_models(f"models with layers with a window of {kind.window}", "none")
    layer = target.of_kind(target.kind(of_kind[-1]))
    if assistant.of_kind(kind).head_dim != layer.head_dim or assistant.num_heads % layer.num_kv_heads:
        sizes = f"{layer.num_kv_heads} KV heads of {layer.head_dim} dimensions"
        raise _other_models(f"models with other heads in layers with a window of {kind.window}", sizes)
    return kind._replace(kv_from=of_kind[-1], num_kv_heads=layer.num_kv_heads)


def _other_models(expected: str, got: object) -> ConfigError:
    fix = 'the assistant of the served model as "model", or none where the model itself has a layer that drafts'
    return ConfigError(f"the method mtp takes an assistant that drafts for {expected}", got=got, fix=fix)
