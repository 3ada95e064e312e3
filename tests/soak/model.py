"""A model directory that is made in a moment: a random Llama of two layers over bytes, with a chat template that knows tools.

What it says means nothing; it says it fast, and the same again for the same prompt.
"""

import json
from pathlib import Path
from typing import Any

from tests.support.chat_templates import QWEN
from tests.support.sample_tokenizers import byte_backend

LENGTH = 2048
_SPECIAL = ("<|im_start|>", "<|im_end|>")


def write_model(folder: Path) -> None:
    """Write config, tokenizer and template into a folder; there are no weights: load it with `load_format="dummy"`."""
    backend = byte_backend(special=_SPECIAL)
    end = backend.token_to_id("<|im_end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": end,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": backend.get_vocab_size(),
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": QWEN,
    }
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
