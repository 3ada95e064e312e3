"""vLLM as a peer of `python -m benchmarks hybrid-turns`: a script for an interpreter that has it.

Its CPU build computes recurrent layers in bfloat16 and with heads of 128 only, so that the checkpoint's config gets such heads,
and the weights are random. The state of a layer then takes as much memory as 96 tokens: vLLM makes its blocks that large.

It reads lines of JSON, each a prompt and the number of tokens to generate, and writes for each a line with the answer and the
leading tokens of the prompt that were found.
"""

import json
import os
import sys
from importlib import import_module

HEADS = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
}


def main(model: str) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm = import_module("vllm")
    llm = vllm.LLM(
        model=model,
        load_format="dummy",
        hf_overrides=HEADS,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        block_size=16,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=True,
    )
    for line in sys.stdin:
        prompt, number = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids), output.num_cached_tokens or 0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
