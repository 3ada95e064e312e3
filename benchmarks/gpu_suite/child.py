"""One part of the suite in a process of its own: a line of JSON for every row, on standard output, as soon as there is one.

    python -m benchmarks.gpu_suite.child PART [--tiny]

A process, so that a part has the device's memory to itself, and a kernel that breaks the device's context breaks one part.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module

from benchmarks.gpu_suite.parts import PARTS
from benchmarks.gpu_suite.sizes import FULL, TINY, Row, Sizes
from jinfercept.errors import ConfigError

TRACEBACK_CHARACTERS = 4000


def part(name: str) -> Callable[[Sizes], Iterator[Row]]:
    """The generator of a part's rows."""
    return getattr(import_module(f"benchmarks.gpu_suite.{PARTS[name].module}"), PARTS[name].function)


def _gpu(name: str) -> str:
    """The GPU that a part will use. Raises `ConfigError` where it would run full sizes on a CPU."""
    if name == "torch_peer":
        import torch  # pyright: ignore[reportMissingImports]

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    else:
        import jax

        if jax.default_backend() == "gpu":
            return jax.devices()[0].device_kind
    library = "torch" if name == "torch_peer" else "JAX"
    raise ConfigError(f"{library} finds no GPU", got="a CPU", fix="install it for CUDA, or pass --tiny")


def main() -> int:
    """Run one part; returns the exit status, 1 if it failed.

    The first line of full sizes is `{"device": name}`, the last line of a failure is `{"error": …}`; the others are rows.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        try:
            if not arguments.tiny:
                print(json.dumps({"device": _gpu(arguments.part)}), file=out, flush=True)
            for row in part(arguments.part)(TINY if arguments.tiny else FULL):
                print(json.dumps(row), file=out, flush=True)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()[-TRACEBACK_CHARACTERS:]}), file=out, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
