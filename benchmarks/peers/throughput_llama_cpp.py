"""llama.cpp as a peer of `python -m benchmarks throughput`: a script for an interpreter with
llama-cpp-python. See `peer_script`.

It reads GGUF files only, and computes with their quantisation whatever the dtype.
"""

import ctypes
import os
import time
from importlib import import_module
from typing import Any

import numpy as np

peer_script: Any = import_module("peer_script")
MOST_TOKENS = 2048
"""Tokens of a call."""


def open_engine(work: dict[str, Any]) -> tuple[str, Any]:
    """The smallest context for the work, one sequence for each request of the largest batch."""
    lib = import_module("llama_cpp")
    lib.llama_backend_init()
    lib.llama_log_set(_silent, None)
    model = lib.llama_model_load_from_file(work["model"].encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {work['model']}; give a GGUF file")
    options, most = lib.llama_context_default_params(), max(work["batches"])
    options.n_seq_max = most
    options.n_ctx = most * (max(work["contexts"]) + work["new_tokens"] + 1)
    options.n_batch = MOST_TOKENS
    options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
    context = lib.llama_init_from_model(model, options)
    num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(MOST_TOKENS, 0, 1)

    def best(place: int) -> int:
        logits = lib.llama_get_logits_ith(context, place)
        return int(np.argmax(np.ctypeslib.as_array(logits, (num_tokens,))))

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens, positions, sequences, and whether a next token is wanted; returns the wanted ones."""
        for place, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.n_tokens = len(entries)
        if lib.llama_decode(context, batch):
            raise SystemExit("llama.cpp could not decode")
        return [best(place) for place, entry in enumerate(entries) if entry[3]]

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        lengths, times = [len(prompt) for prompt in prompts], [list[float]() for _ in prompts]
        todo = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = list[int]()
        began_s = time.perf_counter()
        for start in range(0, len(todo), MOST_TOKENS):
            part = todo[start : start + MOST_TOKENS]
            tokens += decode(part)
            for entry in part:
                if entry[3]:
                    times[entry[2]].append(time.perf_counter() - began_s)
        for step in range(new_tokens - 1):
            tokens = decode(
                [(token, lengths[sequence] + step, sequence, True) for sequence, token in enumerate(tokens)]
            )
            for each in times:
                each.append(time.perf_counter() - began_s)
        return times

    return lib.__version__, generate


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: Any) -> None:
    """Drop a line of the library's log."""


if __name__ == "__main__":
    peer_script.answer(open_engine)
