"""vLLM as a peer of `python -m benchmarks throughput`: a script for an interpreter that has it. See `peer_script`.

A GGUF file gives the architecture only: the weights are random, of the dtype of the work.
"""

import os
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

peer_script: Any = import_module("peer_script")


def open_engine(work: dict[str, Any]) -> tuple[str, Any]:
    """The smallest engine for the work. It computes every prompt: prefixes are not cached."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    vllm = import_module("vllm")
    model, load_format = work["model"], "auto"
    if model.endswith(".gguf"):
        config = import_module("transformers").AutoConfig.from_pretrained(
            Path(model).parent, gguf_file=Path(model).name
        )
        model, load_format = tempfile.mkdtemp(), "dummy"
        config.save_pretrained(model)
    llm = vllm.LLM(
        model=model,
        load_format=load_format,
        dtype=work["dtype"],
        max_model_len=max(work["contexts"]) + work["new_tokens"],
        max_num_seqs=max(work["batches"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    engine, params = llm.llm_engine, import_module("vllm.sampling_params")

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        wanted = params.SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=params.RequestOutputKind.DELTA,
        )
        times = dict[str, list[float]]()
        began_s = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
        while engine.has_unfinished_requests():
            for output in engine.step():
                at_s = time.perf_counter() - began_s
                times.setdefault(output.request_id, []).extend([at_s] * len(output.outputs[0].token_ids))
        return list(times.values())

    return vllm.__version__, generate


if __name__ == "__main__":
    peer_script.answer(open_engine)
