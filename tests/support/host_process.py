"""A program: one host of several serves a workload under policies and prints its tokens, then serves until it is killed.

Arguments: the number of its CPU devices, whether it serves on at the end, and the options of `LLM` as JSON, with `policies`.
"""

import json
import sys
from contextlib import closing
from typing import Any

import jax
from jax._src import compilation_cache, compiler

from jinfercept.start.backend import CompileCounter
from tests.support.tiny_model import Workload, streams, tiny_llm

WORKLOAD = Workload(number=8, seed=7)
SIZES = {
    "kv_tokens": 112,
    "max_model_len": 100,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "swap_space": 0.001,
    "layers_per_step": 3,
}
"""Of a pool that holds little more than the longest sequence, and of few executables."""


def keep(key: str, seconds: float, name: str, backend: Any, executable: Any) -> None:
    """Write what was compiled into JAX's cache. JAX lets host 0 do it alone, whose keys others do not have on CPUs."""
    compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))


def main(num_devices: str, then: str, words: str) -> None:
    compiler._cache_write = keep
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    options = json.loads(words)
    policies, name = options.pop("policies"), options.pop("name")
    with tiny_llm(name, **SIZES, **options) as llm, closing(CompileCounter()) as compilations:
        for policy in policies:
            llm.restart(policy=policy)
            served = streams(WORKLOAD.run(llm, delay_s=0.003))
            counts = {"moved": llm.counters.copied_out, "compiled": compilations.count}
            counts["accepted"] = llm.counters.accepted.total()
            print(json.dumps({"policy": policy, "streams": served, **counts}), flush=True)
        while then == "serve":
            WORKLOAD.run(llm)
            print("{}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
