"""Where the time of a decode step goes on a CPU: XLA's own trace of a run, by kind of operation.

Operations of one step run beside each other, so that their sum is more than the step takes; tracing itself costs some percent.
`ynn_fusion` are products (and small sums), `while` and `cond` the loops of attention with all that is in them.

    python benchmarks/step_profile.py [--batch 1] [--context 32] [--dtype bfloat16] [--model smollm2-135m] [--new-tokens 32]
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jinfercept import LLM, SamplingParams

SHOWN = 16
NO_OPERATION = re.compile(r"\$|Pjit|ThunkExecutor|CommonPjRt|end: |Parse|Handle|Allocate|Slinky|[A-Z]\w*::")
"""Events of the host and of the executor, which contain the operations."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Where the time of a decode step goes on a CPU.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1, help="requests at once (default: 1)")
    parser.add_argument("--context", type=int, default=32, help="prompt tokens (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=32, help="steps that are traced (default: 32)")
    options = parser.parse_args()
    tokens = options.batch * (options.context + 2 * options.new_tokens + 16)
    with LLM(
        options.model,
        lazy=False,
        dtype=options.dtype,
        kv_tokens=max(4096, tokens),
        max_num_seqs=max(8, options.batch),
    ) as llm:
        prompts = [{"prompt_token_ids": [1 + row] * options.context} for row in range(options.batch)]
        params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)
        llm.generate(prompts, params)  # the prompts are cached from here on
        spent, count = traced(lambda: llm.generate(prompts, params))
    steps = options.new_tokens
    table = Table(title=f"{options.model}, {options.dtype}, batch {options.batch}, context {options.context}")
    for column in ("operation", "ms per step", "times per step"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name, nanoseconds in spent.most_common(SHOWN):
        table.add_row(name, f"{nanoseconds / 1e6 / steps:.2f}", f"{count[name] / steps:.1f}")
    Console().print(table)


def traced(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Nanoseconds and number of events, by kind of operation."""
    spent, count = Counter[str](), Counter[str]()
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 2
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        [file] = Path(directory).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    if not NO_OPERATION.match(event.name):
                        kind = re.sub(r"(\.\d+)+$", "", event.name)
                        spent[kind] += event.duration_ns
                        count[kind] += 1
    return spent, count


if __name__ == "__main__":
    main()
