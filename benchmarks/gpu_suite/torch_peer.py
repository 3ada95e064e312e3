"""What torch reaches, as a peer: a decode step of the first model with a static cache, and products with weights of 4 bits.

In a process without JAX. On a GPU all that is timed is one CUDA graph, so that no dispatch is measured, and the layers of the
step are compiled by Inductor. The cache is as long as the context, so that attention needs no mask. Rows of

* steps: `model`, `step` (decode), `batch`, `context`, `layers_per_step` (all), `sampling` (greedy), `compile_s`, `seconds`,
  `roofline_s` (weights but the embedding, and the contexts' keys and values, over the rate of a copy) and `times`;
* products: `weight`, `implementation` (torch), `inputs`, `outputs`, `tokens`, `seconds` of one of `Sizes.calls` in a graph.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.suite.sizes import Row, Sizes
from jinfercept.models.config import ModelConfig

TURNS = 5
MOST_RUNS = 1000
GROUP = 128
"""Numbers that share a scale."""
INNER_TILES = 8
"""Of the layout of `_weight_int4pack_mm`: the fastest for inputs that it divides."""


class TorchDevice:
    """torch on this machine's GPU, or on its CPU."""

    def __init__(self) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        self.torch: Any = torch
        self.is_gpu = torch.cuda.is_available()
        torch.set_default_device("cuda" if self.is_gpu else "cpu")
        torch.manual_seed(0)

    def seconds(self, run: Callable[[], Any], enough_s: float) -> float:
        """The median of some turns, each of as many runs as take `enough_s`; on a GPU a run is a graph."""
        replay = self._graph(run) if self.is_gpu else run
        self._turn(replay, 2)
        runs = max(1, min(MOST_RUNS, round(enough_s / self._turn(replay, 1))))
        return median(self._turn(replay, runs) for _ in range(TURNS))

    def _graph(self, run: Callable[[], Any]) -> Callable[[], None]:
        torch = self.torch
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                run()  # compiles, tunes and allocates
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _turn(self, run: Callable[[], Any], count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            run()
        if self.is_gpu:
            self.torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / count


def rows(sizes: Sizes) -> Iterator[Row]:
    """Time decode steps. Fails as a whole where there is no torch."""
    device = TorchDevice()
    name, config = next(iter(sizes.models.items()))
    block = device.torch.ones(sizes.copy_bytes // 4)
    copy_s = device.seconds(block.clone, sizes.enough_s)
    copy_rate = 2 * block.numel() * block.element_size() / copy_s
    del block
    for batch, context in sizes.decodes[:2]:
        began_s = time.perf_counter()
        with device.torch.inference_mode():
            step = TorchStep(device, config, sizes.dtype, batch, context)
            step.run()
            compile_s = time.perf_counter() - began_s
            seconds = device.seconds(step.run, sizes.enough_s)
        row = {
            "model": f"{name} in torch",
            "step": "decode",
            "batch": batch,
            "context": context,
            "compile_s": compile_s,
        }
        floor_s = step.read_bytes / copy_rate
        row |= {"layers_per_step": config.num_layers, "sampling": "greedy", "seconds": seconds}
        yield row | {"roofline_s": floor_s, "times": seconds / floor_s}
        del step  # its cache goes before the next one comes


class TorchStep:
    """A greedy decode step of a Llama with random weights, whose tokens are those that its last run has chosen."""

    def __init__(self, device: TorchDevice, config: ModelConfig, dtype: str, batch: int, context: int) -> None:
        torch, size = device.torch, config.head_dim
        query, kv = config.num_heads * size, config.num_kv_heads * size
        kind = getattr(torch, dtype)

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, dtype=kind) * shape[-1] ** -0.5

        self.torch, self.config = torch, config
        self.embed, self.head = (
            drawn(config.vocab_size, config.hidden_size),
            drawn(config.vocab_size, config.hidden_size),
        )
        self.norm = torch.ones(config.hidden_size, dtype=kind)
        shapes = {
            "qkv": (query + 2 * kv, config.hidden_size),
            "o": (config.hidden_size, query),
            "gate_up": (2 * config.ffn_size, config.hidden_size),
            "down": (config.hidden_size, config.ffn_size),
        }
        self.layers = [{name: drawn(*shape) for name, shape in shapes.items()} for _ in range(config.num_layers)]
        cache = (batch, config.num_kv_heads, context, size)
        self.caches = [(drawn(*cache), drawn(*cache)) for _ in range(config.num_layers)]
        angles = (context - 1) * config.rope.theta ** (-torch.arange(0, size, 2) / size)
        self.turn = angles.cos().to(kind), angles.sin().to(kind)
        self.tokens = torch.zeros(batch, dtype=torch.long)
        backend = "inductor" if device.is_gpu else "eager"
        self.layer = torch.compile(self._layer, fullgraph=True, dynamic=False, backend=backend)
        read = [self.head, *(weight for layer in self.layers for weight in layer.values())]
        read += [array for pair in self.caches for array in pair]
        self.read_bytes = sum(array.numel() * array.element_size() for array in read)

    def run(self) -> Any:
        """Run the step; returns the logits."""
        functional = self.torch.nn.functional
        x = functional.embedding(self.tokens, self.embed)
        for layer, (keys, values) in zip(self.layers, self.caches, strict=True):
            x = self.layer(x, layer["qkv"], layer["o"], layer["gate_up"], layer["down"], keys, values)
        logits = functional.linear(self._normed(x), self.head)
        self.tokens.copy_(logits.argmax(-1))
        return logits

    def _layer(self, x: Any, qkv: Any, o: Any, gate_up: Any, down: Any, keys: Any, values: Any) -> Any:
        functional, config = self.torch.nn.functional, self.config
        batch, heads, kv_heads = len(x), config.num_heads, config.num_kv_heads
        joined = functional.linear(self._normed(x), qkv).view(batch, heads + 2 * kv_heads, 1, config.head_dim)
        q, key, value = joined.split([heads, kv_heads, kv_heads], 1)
        keys[:, :, -1:] = self._turned(key)
        values[:, :, -1:] = value
        attended = functional.scaled_dot_product_attention(self._turned(q), keys, values, enable_gqa=True)
        x = x + functional.linear(attended.reshape(batch, -1), o)
        gate, up = functional.linear(self._normed(x), gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, down)

    def _normed(self, x: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, self.norm.shape, self.norm, self.config.norm_eps)

    def _turned(self, x: Any) -> Any:
        """Rotary positions: the halves of a head are the two coordinates."""
        left, right = x.chunk(2, -1)
        cos, sin = self.turn
        return self.torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def product_rows(sizes: Sizes) -> Iterator[Row]:
    """Time products with weights of 4 bits in groups of 128, each with weights of its own, one after the other."""
    device = TorchDevice()
    torch, (inputs, outputs) = device.torch, sizes.product
    aten = torch.ops.aten
    scales = torch.ones(inputs // GROUP, outputs, 2, dtype=torch.bfloat16)
    if device.is_gpu:
        drawn = [torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8) for _ in range(sizes.calls)]
        weights = [aten._convert_weight_to_int4pack(each, INNER_TILES) for each in drawn]
        multiply = aten._weight_int4pack_mm
    else:
        drawn = [torch.randint(16, (outputs, inputs), dtype=torch.int32) for _ in range(sizes.calls)]
        weights = [aten._convert_weight_to_int4pack_for_cpu(each, INNER_TILES) for each in drawn]
        multiply = aten._weight_int4pack_mm_for_cpu
    for tokens in sizes.product_tokens:
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16)

        def run(x: Any = x) -> None:
            for weight in weights:
                multiply(x, weight, GROUP, scales)

        seconds = device.seconds(run, sizes.enough_s) / len(weights)
        row = {"weight": "4 bits, groups of 128", "implementation": "torch", "inputs": inputs, "outputs": outputs}
        yield row | {"tokens": tokens, "seconds": seconds}
