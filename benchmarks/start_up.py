"""How long a model takes from nothing to its first token, stage by stage, and how much memory: cold, from the caches, lazy, and
without a network.

Every start is a process of its own; `lazy` is the start of `jinfercept run`. `weights` is what they take in the target dtype; a
file in fewer bits is dequantised, and takes several times its size.

    python benchmarks/start_up.py [smollm2-135m | DIR | FILE.gguf] [--dtype float32] [--kv-tokens 4096] [--repeat 3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from rich.console import Console
from rich.table import Table

CHILD = """
import json, os, sys, time
from jinfercept import LLM, SamplingParams

model, dtype, kv_tokens, began_s, lazy = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), bool(int(sys.argv[5]))
imported_s = time.time()

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

with LLM(model, dtype=dtype, kv_tokens=kv_tokens, lazy=lazy) as llm:
    started_s = time.time()
    llm.generate("Say hi", SamplingParams(temperature=0, max_tokens=1))
    ended_s = time.time()
    times = llm.start_times
    print(json.dumps({
        "imports_s": imported_s - began_s, "load_s": times.load_s, "tokenizer_s": times.tokenizer_s, "pages_s": times.pages_s,
        "compile_s": times.compile_s, "profile_s": times.profile_s, "answer_s": ended_s - started_s,
        "first_token_s": ended_s - began_s,
        "cached": times.num_cached, "executables": times.num_executables, "pending": times.num_pending,
        "weights_mib": llm.memory_plan.weight_bytes / 2**20, "rest_mib": kib("VmRSS") / 2**10, "peak_mib": kib("VmHWM") / 2**10,
    }))
"""
STAGES = {
    "imports": "imports_s",
    "weights": "load_s",
    "tokenizer": "tokenizer_s",
    "pages": "pages_s",
    "executables": "compile_s",
    "profile": "profile_s",
    "answer": "answer_s",
    "first token": "first_token_s",
}
"""Seconds in the table. `answer` includes the executables that a lazy start left; `first token` is the sum and the rest."""
NO_NETWORK = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"), "http://127.0.0.1:9"
) | {"NO_PROXY": "", "no_proxy": "", "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
"""Nothing listens there."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time and memory of starts, cold, cached and offline.")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for `jinfercept run`")
    parser.add_argument("--dtype", action="append", help="float32 or bfloat16 (default: both)")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="tokens of KV (default: 4096)")
    parser.add_argument(
        "--repeat", type=int, default=1, help="starts of each kind but the cold one; the quickest counts"
    )
    options = parser.parse_args()
    rows = []
    console = Console()
    for dtype in options.dtype or ["float32", "bfloat16"]:
        with tempfile.TemporaryDirectory() as cache:
            for how, lazy, extra in (
                ("cold", False, {}),
                ("cached", False, {}),
                ("lazy", True, {}),
                ("offline", False, NO_NETWORK),
            ):
                console.print(f"{dtype}, {how} …", style="dim")
                environment = os.environ | {"JINFERCEPT_CACHE": cache} | extra
                times = 1 if how == "cold" else options.repeat
                runs = [start(options.model, dtype, options.kv_tokens, lazy, environment) for _ in range(times)]
                rows.append({"dtype": dtype, "start": how} | min(runs, key=lambda run: run["first_token_s"]))
    console.print(table(options.model, rows))


def start(model: str, dtype: str, kv_tokens: int, lazy: bool, environment: dict[str, str]) -> dict[str, Any]:
    """One start in a process of its own."""
    command = [sys.executable, "-c", CHILD, model, dtype, str(kv_tokens), str(time.time()), str(int(lazy))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the start failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(model: str, rows: list[dict[str, Any]]) -> Table:
    """A row for each stage, a column for each start."""
    shown = Table(title=f"starts of {model}", caption="seconds and MiB; first token: from the start of the process")
    shown.add_column("")
    for row in rows:
        shown.add_column(f"{row['dtype']}, {row['start']}", justify="right")
    for stage, name in STAGES.items():
        shown.add_row(stage, *(f"{row[name]:.2f} s" for row in rows))
    for label, name in (("weights", "weights_mib"), ("at rest", "rest_mib"), ("peak", "peak_mib")):
        shown.add_row(label, *(f"{row[name]:,.0f} MiB" for row in rows))
    return shown


if __name__ == "__main__":
    main()
