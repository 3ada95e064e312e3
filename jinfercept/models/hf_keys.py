"""Keys of a `config.json`: those that have to be there, and those that would change a model's numbers and are not known.

Most keys mean nothing for the numbers: notes of training, defaults of generation, names of files. transformers ignores any key
that a model's class does not read, so a variant that is saved under the name of its parent runs wrongly there. Here such a key
is refused if its name has a word that fields of transformers' model families have, unless its value leaves all as it is.
"""

import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import ASSISTANT_KEYS

_WORDS = frozenset(  # those of the fields of `configuration_*.py` that shape a text model's output
    """
    act activation alibi altup attend attention attn bidirectional cap capping causal chunk clamp clip compress compressed
    compression conv cross decoder dense depth dequantize emb embed embedding embeddings encoder expert experts factor ffn
    forward gate gated gating geglu glu group groups head heads interleave interleaved kernel kv latent layer layers
    layernorm linear logit logits lora mamba mask memory mlp moe mrope mscale mtp multiplier mup ngram nope norm norms
    normalization normalize parallel partial pattern pos position positional positions postnorm prenorm projection pruned qk
    qkv quant quantization quantizer query rank ratio recurrent relative residual rms rope rotary router routed routing scalar
    scale scales scaling scalings shared sink sinks sliding softcap softcapping softmax sparse sparsity ssm swa swiglu theta
    thinker transform transforms upcycling weight weights window windows yarn text vision audio
    """.split()  # noqa: SIM905 # a list would have a line for each
)
_HARMLESS = re.compile(
    r"^_|^output_|^summary_|^task_|drop|initializer|loss|flash|fp32|gradient|penalty|label|_tokens?$|_token_ids?$"
    r"|^attn_implementation$|^is_decoder$"
)
_USUAL = {"causal": True, "is_causal": True, "rotary": True, "scale_attn_weights": True, "use_rope": True}
_USUAL |= {"full_attn_mod": 1}  # Phi-4 (mini): every layer attends to all tokens
"""Values that leave a model as it is, of keys for which false, 0 or nothing does not."""
_FACTORS = frozenset(("scale", "scaling", "multiplier", "factor", "scalar", "ratio", "mult"))
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"architectures": ["Gemma3ForCausalLM"]},
    "Gemma4ForConditionalGeneration": {"architectures": ["Gemma4ForCausalLM"]},
    "Gemma4UnifiedForConditionalGeneration": {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"},
    "Gemma4AssistantForCausalLM": {"architectures": ["Gemma4ForCausalLM"]},
    "Gemma4UnifiedAssistantForCausalLM": {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"},
    "Mistral3ForConditionalGeneration": {"architectures": None},  # Mistral or Ministral 3, as the part says
    "Qwen3_5ForConditionalGeneration": {"architectures": ["Qwen3_5ForCausalLM"]},
    "Qwen3_5MoeForConditionalGeneration": {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "Qwen3VLForConditionalGeneration": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},  # without images
}
"""Models that read images, too, or draft for others, and what names their parts that read text."""
_OF_PARTS = {
    "Mistral3ForConditionalGeneration": {"model_type": "mistral", "tie_word_embeddings": True},
    "Gemma4UnifiedForConditionalGeneration": {
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
}
"""Values of transformers for keys that are not there in such a part."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model's part that reads text; of other models, the config itself."""
    names, text = config.get("architectures"), config.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(names, list) or names[:1] == []:
        return config
    name = str(names[0])
    if name not in _WITH_IMAGES:
        return config
    outer = {
        key: config[key]
        for key in ("tie_word_embeddings", "quantization_config", "eos_token_id", *ASSISTANT_KEYS)
        if config.get(key) is not None
    }
    return {**_OF_PARTS.get(name, {}), **text, **outer, **_WITH_IMAGES[name]}


def check_keys(config: Mapping[str, Any], understood: Set[str], *, where: str, every: bool = False) -> None:
    """Raise `ModelError` for a key that would change a model's numbers.

    Args:
        understood: keys that are read elsewhere, or change nothing.
        where: of the object, for people.
        every: whether any other key with a value would, whatever its name.
    """
    unknown = {key: value for key, value in config.items() if key not in understood}
    refuse_keys(
        {key: value for key, value in unknown.items() if (every and value) or _changes(str(key), value)}, where=where
    )


def refuse_keys(wrong: Mapping[str, Any], *, where: str) -> None:
    """Raise `ModelError` if there are such keys."""
    if wrong:
        raise ModelError(
            f"{where} has keys that are not understood and could change the model's output",
            got=", ".join(f"{key[:80]} {str(value)[:80]}" for key, value in [*wrong.items()][:5]),
            fix="use a plain model of its family, or remove them if they mean nothing",
        )


def require(config: Mapping[str, Any], keys: Iterable[str], *, where: str) -> None:
    """Raise `ModelError` for keys that are missing or null."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ModelError(
            f"{where} lacks keys", got=f"no {', '.join(missing)}", fix="complete the file or use another model"
        )


def _changes(key: str, value: Any) -> bool:
    words = _WORDS.intersection(re.split(r"[^a-z0-9]+", key.lower()))
    if key in _USUAL:
        return value is not None and value != _USUAL[key]
    if not words or _HARMLESS.search(key) or not value:
        return False
    return not (isinstance(value, int | float) and value is not True and value == 1 and words & _FACTORS)


def check_numbers(config: Mapping[str, Any], keys: Iterable[str], *, whole: bool = True) -> None:
    """Raise `ModelError` unless these are numbers above 0, and whole ones but for epsilons."""
    for key in keys:
        value, is_whole = config[key], whole and not key.endswith(("eps", "epsilon"))
        right = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not right or not 0 < value < math.inf:
            raise ModelError(
                f"{key} of the config is a {'whole number' if is_whole else 'number'} above 0",
                got=shown(value),
                fix="correct the file or download it again",
            )


def flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A key that is true or false. Raises `ModelError` for another value."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} of the config is true or false", got=shown(value), fix="correct the file")
    return value


def refuse_unless(config: Mapping[str, Any], **implemented: tuple[object, ...]) -> None:
    for key, values in implemented.items():
        if config.get(key, values[0]) not in values:
            raise ModelError(
                f"{key} of config.json is not supported", got=shown(config[key]), fix=f"use a model with {values[0]}"
            )
