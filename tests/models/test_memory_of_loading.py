"""The host never holds the weights twice: the peak of a load, measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent.parent / "golden"
COMPILING = 32 << 20  # for the few small executables that place weights; a constant, which a small model shows

MEASURE = """
import sys
import jax
from pathlib import Path
from jinfercept.models.load import load
from jinfercept.models.mesh import ModelMesh

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

tiny, model, dtype = sys.argv[1:]
mesh = ModelMesh(tuple(jax.devices()))
jax.block_until_ready(load(tiny, dtype=dtype, mesh=mesh).params)  # what JAX itself takes
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
params = load(model, dtype=dtype, mesh=mesh).params
weights = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(params)}
print(sum(weights.values()), status("VmHWM") - before)
"""


def write(directory: Path, *, hidden: int, ffn: int, layers: int, vocab: int) -> None:
    """A Llama of ones, in two files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    for i in range(layers):
        shapes |= {f"layers.{i}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"layers.{i}.mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"layers.{i}.mlp.down_proj": (hidden, ffn)}
        shapes |= {f"layers.{i}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    shapes = {f"model.{name}.weight": shape for name, shape in shapes.items()} | {"lm_head.weight": (vocab, hidden)}
    names, where = list(shapes), {}
    for part in range(2):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        tensor_names = names[part::2]
        save_file({name: np.ones(shapes[name], ml_dtypes.bfloat16) for name in tensor_names}, directory / file)
        where |= dict.fromkeys(tensor_names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def peak(model: Path, dtype: str, num_devices: int = 1) -> tuple[int, int]:
    """Bytes of the weights, and the most by which memory grew while they were loaded onto so many parts of the CPU."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are reset through /proc, which only Linux has")
    command = [sys.executable, "-c", MEASURE, str(GOLDEN / "llama_gqa"), str(model), dtype]
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | devices)
    weights, grown = map(int, done.stdout.split())
    return weights, grown


def test_a_small_checkpoint_is_loaded_beside_little_else(tmp_path):
    write(tmp_path, hidden=512, ffn=1536, layers=6, vocab=8000)
    weights, grown = peak(tmp_path, "float32")
    assert weights > 100e6
    assert grown < 1.2 * weights + COMPILING


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_takes_less_than_a_fifth_more_than_its_weights(tmp_path, dtype):
    write(tmp_path, hidden=1024, ffn=2816, layers=10, vocab=16000)
    weights, grown = peak(tmp_path, dtype)
    assert weights > 250e6
    assert grown < 1.2 * weights


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_checkpoint_cut_among_devices_takes_less_than_a_layer_more_than_its_parts(tmp_path, num_devices):
    write(tmp_path, hidden=1024, ffn=2816, layers=10, vocab=16000)
    weights, grown = peak(tmp_path, "float32", num_devices)
    assert grown < weights + 4 * (4 * 1024**2 + 3 * 1024 * 2816) + COMPILING
