"""Copies of pages between the memory of TPUs and their hosts', compiled as programs of their own. No TPU runs here.

An engine lets JAX's runtime copy them, which compiles nothing: this shows that there is such a memory beside every generation.
"""

import json
import subprocess
import sys

import pytest

from benchmarks.ahead_of_time.plugin import PluginMissingError, tpu_environment

PROGRAM = """
import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.ahead_of_time.compiler import tpus
from jinfercept.runner.page_transfers import heads_spec

compiled = []
for tpu, size in [("v4", 1), ("v5e", 4), ("v5e", 16), ("v5p", 8), ("v6e", 8), ("tpu7x", 8)]:
    device = NamedSharding(tpus(tpu, size).mesh, heads_spec(5))
    for source, to in ((device, "pinned_host"), (device.with_memory_kind("pinned_host"), "device")):
        pages = jax.ShapeDtypeStruct((16, 2, 16, 32, 128), jnp.bfloat16, sharding=source)
        copy = jax.jit(lambda pages: pages, out_shardings=device.with_memory_kind(to)).lower(pages).compile()
        memory = copy.memory_analysis()
        compiled.append((size, to, memory.host_output_size_in_bytes, memory.output_size_in_bytes))
print(json.dumps(compiled))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_copies_to_the_host_and_back_compile_for_all_generations() -> None:
    try:
        environment = tpu_environment()
    except PluginMissingError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    copies = json.loads(done.stdout.splitlines()[-1])
    assert len(copies) == 12
    for size, to, on_host, on_device in copies:
        part = 16 * 2 * 16 * 32 * 128 * 2 // size
        assert (on_host, on_device) == ((part, 0) if to == "pinned_host" else (0, part))
