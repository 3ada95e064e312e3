"""What the commands `run` and `info` show besides a chat: streamed text, a model's facts."""

import sys

import jax
from rich.console import Console
from rich.table import Table

from jinfercept.cli.terminal_text import harmless
from jinfercept.events import Finished, Resumed, Token
from jinfercept.llm import LLM
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import kv_bytes_per_token, param_bytes
from jinfercept.request import SamplingParams


def complete(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Write the prompt's continuation to standard output as it comes."""
    for event in llm.stream(prompt, params):
        if isinstance(event, Token | Resumed | Finished):
            print(harmless(event.text) if sys.stdout.isatty() else event.text, end="", flush=True)
    print(flush=True)


def describe(name: str, config: ModelConfig) -> None:
    """A model's shape and what it takes, without loading it."""
    table = Table(title=name, show_header=False)
    for row in (
        ("architecture", config.family),
        ("layers", config.num_layers),
        ("embedding", config.hidden_size),
        ("query heads × head dim", f"{config.num_heads} × {config.head_dim}"),
        ("KV heads", config.num_kv_heads),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest sequence", f"{config.max_position:,}"),
        ("rotary scaling", config.rope.scaling),
        ("devices", ", ".join(f"{device.platform} {device.id}" for device in jax.devices())),
    ):
        table.add_row(row[0], str(row[1]))
    for dtype in ("float32", "bfloat16"):
        weights, token = param_bytes(config, dtype), kv_bytes_per_token(config, dtype)
        table.add_row(dtype, f"weights {weights / 2**30:.2f} GiB, KV {token / 2**10:.0f} KiB per token")
    Console().print(table)
