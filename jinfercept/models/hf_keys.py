"""Keys of a `config.json`: those that have to be there, and those that would change a model's numbers and are not known.

Most keys mean nothing for the numbers: notes of training, defaults of generation, names of files. transformers ignores any key
that a model's class does not read, so a variant that is saved under the name of its parent runs wrongly there. Here such a key
is refused if its name has a word that fields of transformers' model families have, unless its value leaves all as it is.
"""

import re
from collections.abc import Mapping, Set
from typing import Any

from jinfercept.errors import ModelError

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
_USUAL = {
    "causal": True,
    "is_causal": True,
    "rotary": True,
    "scale_attn_weights": True,
    "use_rope": True,
}
"""Values that leave a model as it is, of keys for which false, 0 or nothing does not."""
_FACTORS = frozenset(("scale", "scaling", "multiplier", "factor", "scalar", "ratio", "mult"))


def check_keys(config: Mapping[str, Any], understood: Set[str], *, where: str, every: bool = False) -> None:
    """Raise `ModelError` for a key that would change a model's numbers.

    Args:
        understood: keys that are read elsewhere, or change nothing.
        where: of the object, for people.
        every: whether any other key with a value would, whatever its name.
    """
    others = {key: value for key, value in config.items() if key not in understood}
    wrong = [key for key, value in others.items() if (every and value) or _changes(str(key), value)]
    if wrong:
        raise ModelError(
            f"{where} has keys that are not understood and could change the model's output",
            got=", ".join(f"{key[:80]} {str(others[key])[:80]}" for key in wrong[:5]),
            fix="use a plain model of its family, or remove them if they mean nothing",
        )


def require(config: Mapping[str, Any], keys: tuple[str, ...], *, where: str) -> None:
    """Raise `ModelError` for keys that are missing or null."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ModelError(
            f"{where} lacks keys", got=f"no {', '.join(missing)}", fix="complete the file or use another model"
        )


def _changes(key: str, value: Any) -> bool:
    words = _WORDS.intersection(re.split(r"[^a-z0-9]+", key.lower()))
    if key in _USUAL:
        return value is not None and value is not _USUAL[key]
    if not words or _HARMLESS.search(key) or not value:
        return False
    return not (isinstance(value, int | float) and value is not True and value == 1 and words & _FACTORS)
