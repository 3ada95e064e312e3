"""Serve a Flax model of your own: a small NNX transformer with random weights, which babbles numbers.

The engine asks for a few numbers and three functions, `embed`, `layer` and `head` (`jinfercept.models.protocol`); pages,
sampling, calls and scheduling are its own. Several devices can serve it, since it says how they cut its weights. Run it with
`python examples/own_model.py`, or with `python examples/own_model.py 2` on two devices.
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jinfercept.config import LLMOptions
from jinfercept.llm import LLM
from jinfercept.models.blocks import Attend
from jinfercept.models.parallel import AXIS, add_partial_sums
from jinfercept.models.protocol import Params, Weights
from jinfercept.sampling_params import SamplingParams


@dataclass(frozen=True)
class Numbers:
    """What the engine plans memory and shapes with."""

    family: str = "grouped queries, without positions"
    vocab_size: int = 100
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    max_position: int = 256
    eos_token_ids: tuple[int, ...] = ()


class Block(nnx.Module):
    """Attention and a squared-ReLU network side by side; the causal mask alone tells positions."""

    def __init__(self, numbers: Numbers, rngs: nnx.Rngs) -> None:
        e, h, k, d = numbers.hidden_size, numbers.num_heads, numbers.num_kv_heads, numbers.head_dim
        self.norm = nnx.LayerNorm(e, rngs=rngs)
        self.q = nnx.LinearGeneral(e, (h, d), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(e, (k, d), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(e, (k, d), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((h, d), e, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.up = nnx.Linear(e, 4 * e, rngs=rngs)
        self.down = nnx.Linear(4 * e, e, use_bias=False, rngs=rngs)

    def __call__[KV](self, x: jax.Array, kv: KV, attend: Attend[KV]) -> tuple[jax.Array, KV]:
        y = self.norm(x)
        attended, kv = attend(self.q(y), self.k(y), self.v(y), kv)  # the engine keeps the keys and values
        network = self.down(jnp.square(nnx.relu(self.up(y))))
        return add_partial_sums(x, self.o(attended), network), kv


class OwnModel:
    """The static halves of the modules; the weights come with every call."""

    def __init__(self, numbers: Numbers, embed: nnx.Module, block: nnx.Module, head: nnx.Module) -> None:
        self.config = numbers
        self._embed, self._block, self._head = nnx.graphdef(embed), nnx.graphdef(block), nnx.graphdef(head)

    def embed(self, params: Weights, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.merge(self._embed, params)(tokens)

    def layer[KV](
        self, params: Weights, x: jax.Array, positions: jax.Array, kv: KV, attend: Attend[KV]
    ) -> tuple[jax.Array, KV]:
        return nnx.merge(self._block, params)(x, kv, attend)

    def head(self, params: Weights, x: jax.Array) -> jax.Array:
        return nnx.merge(self._head, params)(x)

    def partition_specs(self) -> Params:
        """Heads and the network's inner axis are cut; the rest is whole on every device."""
        whole, inputs, outputs = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)
        up = {"kernel": outputs, "bias": PartitionSpec(AXIS)}
        block = {"norm": whole, "q": outputs, "k": outputs, "v": outputs, "o": inputs, "up": up, "down": inputs}
        return Params({"embedding": whole}, (block,) * self.config.num_layers, {"kernel": whole, "bias": whole})


def make(seed: int = 0) -> tuple[OwnModel, Params]:
    """The model and its weights."""
    numbers, rngs = Numbers(), nnx.Rngs(seed)
    embed = nnx.Embed(numbers.vocab_size, numbers.hidden_size, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
    blocks = [Block(numbers, rngs) for _ in range(numbers.num_layers)]
    head = nnx.Linear(numbers.hidden_size, numbers.vocab_size, rngs=rngs)

    def weights(module: nnx.Module) -> Weights:
        return nnx.to_pure_dict(nnx.state(module))

    params = Params(weights(embed), tuple(map(weights, blocks)), weights(head))
    return OwnModel(numbers, embed, blocks[0], head), params


def main(tensor_parallel_size: int = 1) -> list[list[int]]:
    """Continue two prompts; returns and prints the tokens."""
    model, params = make()
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": list(range(40))}]
    sizes: LLMOptions = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "tensor_parallel_size": tensor_parallel_size}
    with LLM(model, params=params, **sizes) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16))
    tokens = [output.outputs[0].token_ids for output in outputs]
    for prompt, continuation in zip(prompts, tokens, strict=True):
        print(*prompt["prompt_token_ids"], "→", *continuation)
    return tokens


if __name__ == "__main__":
    num_devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_num_cpu_devices", num_devices)
    main(num_devices)
