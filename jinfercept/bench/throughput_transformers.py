"""Hugging Face transformers as a peer of `jinfercept bench throughput`: a script for an interpreter that has torch.

Imports nothing of jinfercept, which need not be installed there. The work comes as JSON on standard input, the cells go as
one line of JSON to standard output; see `throughput_peers.measure_peer`.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROUNDS, TIMEOUT_S = 3, 10.0
"""As in `throughput`."""


def main() -> None:
    """Measure the cells that standard input names."""
    torch, transformers = import_module("torch"), import_module("transformers")
    work = json.load(sys.stdin)
    model = _load(transformers, work["model"], getattr(torch, work["dtype"]))
    places = [(batch, context) for context in work["contexts"] for batch in work["batches"]]
    _cell(torch, model, 1, 8, work | {"new_tokens": 2})
    cells = [_cell(torch, model, batch, context, work) for batch, context in places]
    print(json.dumps({"version": f"{transformers.__version__}, torch {torch.__version__}", "cells": cells}))


def _load(transformers: Any, model: str, dtype: Any) -> Any:
    path = Path(model)
    auto = transformers.AutoModelForCausalLM
    if path.suffix == ".gguf":
        return auto.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
    return auto.from_pretrained(model, dtype=dtype).eval()


def _cell(torch: Any, model: Any, batch: int, context: int, work: dict[str, Any]) -> dict[str, float]:
    """Decode from the first logits to the last of one `generate`, prefill until the first."""
    began_s, rounds = time.perf_counter(), []
    while not rounds or (len(rounds) < ROUNDS and time.perf_counter() - began_s < TIMEOUT_S):
        torch.manual_seed(len(rounds))
        tokens = torch.randint(work["vocab_size"], (batch, context))
        times = _generate(torch, model, tokens, work["new_tokens"])
        rounds.append((batch * (len(times) - 1) / (times[-1] - times[0]), batch * context / times[0]))
    return {
        "batch": batch,
        "context": context,
        "decode_tokens_per_s": max(decode for decode, _ in rounds),
        "prefill_tokens_per_s": max(prefill for _, prefill in rounds),
    }


def _generate(torch: Any, model: Any, tokens: Any, new_tokens: int) -> list[float]:
    """Seconds to the logits of every new token."""
    times = []

    def note(_: Any, scores: Any) -> Any:
        times.append(time.perf_counter() - start_s)
        return scores

    start_s = time.perf_counter()
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
    return times


if __name__ == "__main__":
    main()
