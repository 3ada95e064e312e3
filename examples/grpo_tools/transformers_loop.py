"""The loop of `compare` with transformers' `generate`: a script for an interpreter with torch, transformers and gguf.

Reads its work as JSON from standard input, writes JSON to standard output. A round is one `generate` of all open samples, left
padded, up to a call or the end of each; its tools run in threads, and the next round begins with the longer texts.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
functions: Any = import_module("functions")


def load(work: "dict[str, Any]") -> "tuple[Any, Any]":
    """The model with the adapter merged into it, in float32, and its tokenizer."""
    torch, transformers = import_module("torch"), import_module("transformers")
    path = Path(work["model"])
    where: "dict[str, Any]" = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    if work["adapter"] is not None:
        folder = Path(work["adapter"])
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = import_module("safetensors.torch").load_file(folder / "adapter_model.safetensors")
        weights, scale = dict(model.named_parameters()), config["lora_alpha"] / config["r"]
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            stem = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")].float()
            weights[f"{stem}.weight"].data += scale * (b @ tensors[name].float())
    return model, tokenizer


def sample(model: Any, tokenizer: Any, work: "dict[str, Any]") -> "dict[str, Any]":
    """All samples: seconds, texts and calls."""
    torch, transformers = import_module("torch"), import_module("transformers")
    stops = (*work["stops"], "=")
    ends = torch.tensor(
        [any(stop in tokenizer.decode([token]) for stop in stops) for token in range(model.config.vocab_size)]
    )

    class Ended(transformers.StoppingCriteria):
        def __call__(self, ids: Any, scores: Any, **others: Any) -> Any:
            return ends[ids[:, -1]]

    began_s = time.perf_counter()
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in work["prompts"]]
    left, texts = [work["max_tokens"]] * len(ids), [""] * len(ids)
    calls: "list[list[tuple[str, str]]]" = [[] for _ in ids]
    places = list(range(len(ids)))
    with ThreadPoolExecutor(len(ids)) as pool, torch.inference_mode():
        while places:
            width = max(len(ids[place]) for place in places)
            rows = torch.tensor([[0] * (width - len(ids[place])) + ids[place] for place in places])
            mask = torch.tensor([[0] * (width - len(ids[place])) + [1] * len(ids[place]) for place in places])
            made = model.generate(
                rows,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(left[place] for place in places),
                stopping_criteria=transformers.StoppingCriteriaList([Ended()]),
                pad_token_id=0,
            )[:, width:].tolist()
            run = []
            for place, row in zip(places, made, strict=True):
                end = next((at + 1 for at, token in enumerate(row) if ends[token]), len(row))
                own = row[: min(end, left[place])]
                ids[place], left[place] = ids[place] + own, left[place] - len(own)
                texts[place] += tokenizer.decode(own)
                if texts[place].endswith("=") and left[place] > 0:
                    call = functions.split_call(texts[place])
                    if call is not None:
                        run.append((place, *call))
            results = pool.map(lambda item: functions.run_tool(item[1], item[2], work["slow_s"]), run)
            for (place, name, arguments), result in zip(run, results, strict=True):
                calls[place].append((name, arguments))
                text = result + functions.MARKS[name][1]
                texts[place] += text
                ids[place] = ids[place] + tokenizer(text, add_special_tokens=False)["input_ids"]
            places = [place for place, _, _ in run]
    return {"seconds": time.perf_counter() - began_s, "texts": texts, "calls": calls}


if __name__ == "__main__":
    given = json.loads(sys.stdin.read())
    loaded = load(given)
    print(json.dumps(min((sample(*loaded, given) for _ in range(given["repeats"])), key=lambda run: run["seconds"])))
