"""Hugging Face transformers as a peer of `python -m benchmarks throughput`: a script for an interpreter with torch.

See `peer_script`.
"""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

peer_script: Any = import_module("peer_script")


def open_engine(work: dict[str, Any]) -> tuple[str, Any]:
    """The model, in the dtype of the work. Each step's logits are a token of every request."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = _load(transformers, work["model"], getattr(torch, work["dtype"]))

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        tokens, times = torch.tensor(prompts), list[float]()

        def note(_: Any, scores: Any) -> Any:
            times.append(time.perf_counter() - began_s)
            return scores

        began_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[note],
            )
        return [times] * len(prompts)

    return f"{transformers.__version__}, torch {torch.__version__}", generate


def _load(transformers: Any, model: str, dtype: Any) -> Any:
    path = Path(model)
    auto = transformers.AutoModelForCausalLM
    if path.suffix == ".gguf":
        return auto.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
    return auto.from_pretrained(model, dtype=dtype).eval()


if __name__ == "__main__":
    peer_script.answer(open_engine)
