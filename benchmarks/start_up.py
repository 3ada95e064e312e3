"""How long a model takes from nothing to its first token, and how much memory: cold, from the caches, and without a network.

Every start is a process of its own. `weights` is what they take in the target dtype; a file in fewer bits is dequantised, and
takes several times its size.

    python benchmarks/start_up.py [smollm2-135m | DIR | FILE.gguf] [--dtype float32 --dtype bfloat16] [--kv-tokens 4096]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CHILD = """
import json, os, sys, time
from jinfercept import LLM, SamplingParams

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

model, dtype, kv_tokens, began_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
with LLM(model, dtype=dtype, kv_tokens=kv_tokens) as llm:
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=1))
    first_token_s = time.time() - began_s
    times = llm.start_times
    print(json.dumps({
        "first_token_s": first_token_s, "load_s": times.load_s, "compile_s": times.compile_s, "profile_s": times.profile_s,
        "cached": times.num_cached, "executables": times.num_executables,
        "weights_mib": llm.memory_plan.weight_bytes / 2**20, "rest_mib": kib("VmRSS") / 2**10, "peak_mib": kib("VmHWM") / 2**10,
    }))
"""
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
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows = []
    console = Console()
    for dtype in options.dtype or ["float32", "bfloat16"]:
        with tempfile.TemporaryDirectory() as cache:
            for how, extra in (("cold", {}), ("cached", {}), ("offline", NO_NETWORK)):
                console.print(f"{dtype}, {how} …", style="dim")
                environment = os.environ | {"JINFERCEPT_CACHE": cache} | extra
                rows.append(
                    {"dtype": dtype, "start": how} | start(options.model, dtype, options.kv_tokens, environment)
                )
    console.print(table(options.model, rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def start(model: str, dtype: str, kv_tokens: int, environment: dict[str, str]) -> dict[str, Any]:
    """One start in a process of its own."""
    command = [sys.executable, "-c", CHILD, model, dtype, str(kv_tokens), str(time.time())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the start failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(model: str, rows: list[dict[str, Any]]) -> Table:
    """All starts."""
    shown = Table(title=f"starts of {model}", caption="seconds and MiB; first token: from the start of the process")
    columns = ("dtype", "start", "first token", "load", "compile", "profile", "weights", "at rest", "peak")
    for column in columns:
        shown.add_column(column, justify="left" if column in ("dtype", "start") else "right")
    for row in rows:
        seconds = [f"{row[name]:.1f}" for name in ("first_token_s", "load_s", "compile_s", "profile_s")]
        memory = [f"{row[name]:,.0f}" for name in ("weights_mib", "rest_mib", "peak_mib")]
        shown.add_row(row["dtype"], row["start"], *seconds, *memory)
    return shown


if __name__ == "__main__":
    main()
