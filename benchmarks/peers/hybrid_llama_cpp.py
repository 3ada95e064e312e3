"""llama-cpp-python as a peer of `python -m benchmarks hybrid-turns`: a script for an interpreter that has it, and gguf.

A GGUF file cannot have the checkpoint's heads (one size serves keys and values), so the model is a Qwen3.5 of the same kinds of
layers with random weights. Like `hybrid_vllm`, it reads prompts as lines of JSON and writes a line for each.
"""

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

WIDTH, HEADS, HEAD_DIM, STATE_DIM, VOCABULARY, LAYERS = 32, 4, 16, 8, 128, 4


def write_model(path: str) -> None:
    """A Qwen3.5 of four layers, of which the last has attention."""
    np, gguf = import_module("numpy"), import_module("gguf")
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "qwen35")
    numbers = {
        "context_length": 2048,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": 64,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": 8,
        "ssm.conv_kernel": 4,
        "ssm.state_size": STATE_DIM,
        "ssm.group_count": 2,
        "ssm.time_step_rank": HEADS,
        "ssm.inner_size": HEADS * STATE_DIM,
        "full_attention_interval": LAYERS,
        "vocab_size": VOCABULARY,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"qwen35.{name}", number)
    writer.add_float32("qwen35.rope.freq_base", 10000.0)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("qwen35.rope.dimension_sections", [2, 1, 1, 0])
    writer.add_tokenizer_model("none")

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0.0, 0.3, shape)
        writer.add_tensor(name, (-abs(values) if name.endswith("ssm_a") else values).astype(np.float32))

    keys, values = 2 * STATE_DIM, HEADS * STATE_DIM
    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", WIDTH)
        add(block + "post_attention_norm.weight", WIDTH)
        if layer == LAYERS - 1:
            add(block + "attn_q.weight", 2 * HEADS * HEAD_DIM, WIDTH)
            add(block + "attn_k.weight", 2 * HEAD_DIM, WIDTH)
            add(block + "attn_v.weight", 2 * HEAD_DIM, WIDTH)
            add(block + "attn_output.weight", WIDTH, HEADS * HEAD_DIM)
            add(block + "attn_q_norm.weight", HEAD_DIM)
            add(block + "attn_k_norm.weight", HEAD_DIM)
        else:
            add(block + "attn_qkv.weight", 2 * keys + values, WIDTH)
            add(block + "attn_gate.weight", values, WIDTH)
            add(block + "ssm_conv1d.weight", 2 * keys + values, 4)
            add(block + "ssm_dt.bias", HEADS)
            add(block + "ssm_a", HEADS)
            add(block + "ssm_beta.weight", HEADS, WIDTH)
            add(block + "ssm_alpha.weight", HEADS, WIDTH)
            add(block + "ssm_norm.weight", STATE_DIM)
            add(block + "ssm_out.weight", WIDTH, values)
        add(block + "ffn_gate.weight", 64, WIDTH)
        add(block + "ffn_up.weight", 64, WIDTH)
        add(block + "ffn_down.weight", WIDTH, 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    llama_cpp: Any = import_module("llama_cpp")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.gguf"))
        write_model(path)
        llm = llama_cpp.Llama(path, n_ctx=2048, n_batch=256, n_threads=1, verbose=False)
    evaluated, evaluate = [0], llm.eval

    def counted(tokens: Any) -> Any:
        evaluated[0] += len(tokens)
        return evaluate(tokens)

    llm.eval = counted
    for line in sys.stdin:
        prompt, number = json.loads(line)
        evaluated[0], answer, computed = 0, list[int](), 0
        for token in llm.generate(prompt, temp=0.0):
            computed = computed or evaluated[0]
            answer.append(int(token))
            if len(answer) == number:
                break
        print(json.dumps([answer, len(prompt) - computed]), flush=True)


if __name__ == "__main__":
    main()
