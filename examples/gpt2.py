"""Serve GPT-2 as a model of your own: learned positions in the embedding, and layers of two kinds if you like.

`python examples/gpt2.py` writes with random weights; `python examples/gpt2.py DIRECTORY` serves a checkpoint of
transformers' `GPT2LMHeadModel` (`config.json`, `model.safetensors`). With `--window 64` every second layer sees only the last
64 tokens, as in GPT-3 (arXiv 2005.14165, section 2.1).
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jinfercept.llm import LLM
from jinfercept.models.blocks import Attend
from jinfercept.models.protocol import Params, Weights
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.sampling_params import SamplingParams


@dataclass(frozen=True)
class Sizes:
    """What the engine plans memory and shapes with. Its `repr` names the model where profiles and pages are stored.

    `window` is that of every second layer; None: all layers are alike.
    """

    family: str = "gpt2"
    vocab_size: int = 128
    hidden_size: int = 32
    num_layers: int = 4
    num_heads: int = 4
    max_position: int = 128
    eos_token_ids: tuple[int, ...] = ()
    window: int | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class GPT2:
    """The functions of the model."""

    config: Sizes = Sizes()

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """One executable for each kind."""
        count = self.config.num_layers
        return () if self.config.window is None else tuple("banded" if index % 2 else "dense" for index in range(count))

    def layer_window(self, kind: str) -> int | None:
        """Tokens that a token sees in layers of this kind; None: all before it."""
        return self.config.window if kind == "banded" else None

    def embed(self, params: Weights, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return params["wte.weight"][tokens] + params["wpe.weight"][positions]

    def layer[KV](
        self, params: Weights, x: jax.Array, positions: jax.Array, kv: KV, attend: Attend[KV], *, kind: str = "dense"
    ) -> tuple[jax.Array, KV]:
        heads = len(x), self.config.num_heads, self.config.head_dim
        q, k, v = jnp.split(_dense(params, "attn.c_attn", _norm(params, "ln_1", x)), 3, axis=-1)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        # the engine writes the keys and values into pages, and attends to all that this token may see
        attended, kv = attend(q, k, v, kv, Scoring(window=self.layer_window(kind)))
        x = x + _dense(params, "attn.c_proj", attended.reshape(x.shape))
        inner = jax.nn.gelu(_dense(params, "mlp.c_fc", _norm(params, "ln_2", x)), approximate=True)
        return x + _dense(params, "mlp.c_proj", inner), kv

    def head(self, params: Weights, x: jax.Array) -> jax.Array:
        return (_norm(params, "ln_f", x) @ params["wte.weight"].T).astype(jnp.float32)


def _dense(params: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"][None]


def _norm(params: Weights, name: str, x: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-5)
    return x * params[f"{name}.weight"][None] + params[f"{name}.bias"][None]


def random_weights(sizes: Sizes, seed: int = 0) -> Params:
    """Weights that babble."""
    rng, e = np.random.default_rng(seed), sizes.hidden_size

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, 1.0, shape).astype(np.float32)

    def norm(name: str) -> Weights:
        return {f"{name}.weight": np.ones(e, np.float32), f"{name}.bias": np.zeros(e, np.float32)}

    shapes = {"attn.c_attn": (e, 3 * e), "attn.c_proj": (e, e), "mlp.c_fc": (e, 4 * e), "mlp.c_proj": (4 * e, e)}

    def layer() -> Weights:
        dense = {f"{name}.weight": normal(*shape) for name, shape in shapes.items()}
        biases = {f"{name}.bias": normal(shape[1]) for name, shape in shapes.items()}
        return dense | biases | norm("ln_1") | norm("ln_2")

    embed = {"wte.weight": normal(sizes.vocab_size, e), "wpe.weight": normal(sizes.max_position, e)}
    head = {"wte.weight": embed["wte.weight"], **norm("ln_f")}
    return Params(embed, tuple(layer() for _ in range(sizes.num_layers)), head)


def checkpoint(directory: Path) -> tuple[Sizes, Params]:
    """The sizes and weights that transformers saved."""
    config = json.loads((directory / "config.json").read_text())
    sizes = Sizes(
        vocab_size=config["vocab_size"],
        hidden_size=config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        max_position=config["n_positions"],
        eos_token_ids=(config["eos_token_id"],),
    )
    tensors = load_file(directory / "model.safetensors")
    stored = {name.removeprefix("transformer."): tensor.astype(np.float32) for name, tensor in tensors.items()}

    def block(prefix: str) -> Weights:
        return {name.removeprefix(prefix): w for name, w in stored.items() if name.startswith(prefix)}

    layers = tuple(block(f"h.{index}.") for index in range(sizes.num_layers))
    embed = {name: stored[name] for name in ("wte.weight", "wpe.weight")}
    head = {name: stored[name] for name in ("wte.weight", "ln_f.weight", "ln_f.bias")}
    return sizes, Params(embed, layers, head)


def main(directory: Path | None = None, window: int | None = None) -> list[list[int]]:
    """Continue two prompts; returns and prints the tokens."""
    sizes, params = (Sizes(), random_weights(Sizes())) if directory is None else checkpoint(directory)
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": list(range(40))}]
    model = GPT2(replace(sizes, window=window))
    with LLM(model, params=params, max_num_seqs=2, max_num_batched_tokens=8, kv_tokens=256) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    tokens = [output.outputs[0].token_ids for output in outputs]
    for prompt, continuation in zip(prompts, tokens, strict=True):
        print(*prompt["prompt_token_ids"], "→", *continuation)
    return tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--window", type=int)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.window)
