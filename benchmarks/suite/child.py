"""One part of a suite in a process of its own: its rows as JSON, one a line, on standard output as they come.

    python -m benchmarks.suite.child gpu|tpu PART [--tiny]

A process, so that a part has the device's memory to itself, and a kernel that breaks the device's context breaks one part.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module

from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.kinds import KINDS
from benchmarks.suite.sizes import Row, Sizes
from jinfercept.errors import ConfigError

TRACEBACK_CHARACTERS = 4000


def part(kind: SuiteKind, name: str) -> Callable[[Sizes], Iterator[Row]]:
    """The generator of a part's rows."""
    chosen = kind.parts[name]
    return getattr(import_module(f"benchmarks.{chosen.module}"), chosen.function)


def _check_device(kind: SuiteKind, name: str) -> None:
    """Raise `ConfigError` where a part would run full sizes on a CPU.

    Starts no backend of JAX: a part may set how it starts.
    """
    if "torch" in kind.parts[name].packages:
        import torch  # pyright: ignore[reportMissingImports]

        library, there = "torch", torch.cuda.is_available()
    else:
        import jax

        library, there = "JAX", (jax.config.jax_platforms or "").startswith(kind.platform)
    if not there:
        raise ConfigError(f"{library} finds no {kind.device}", got="a CPU", fix=f"{kind.install}, or pass --tiny")


def _device(kind: SuiteKind, name: str) -> str:
    """The device that a part has used."""
    if "torch" in kind.parts[name].packages:
        import torch  # pyright: ignore[reportMissingImports]

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    import jax

    return jax.devices()[0].device_kind


def main() -> int:
    """Run one part; returns the exit status, 1 if it failed.

    Behind the first row stands `{"device": name}`, the last line of a failure is `{"error": …}`; the others are rows.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("part")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    kind = KINDS[arguments.kind]
    out = sys.stdout

    def write(row: Row) -> None:
        print(json.dumps(row), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        try:
            if not arguments.tiny:
                _check_device(kind, arguments.part)
            sizes = kind.tiny if arguments.tiny else kind.full()
            for number, row in enumerate(part(kind, arguments.part)(sizes)):
                write(row)
                if not number:
                    write({"device": _device(kind, arguments.part)})
        except Exception:
            write({"error": traceback.format_exc()[-TRACEBACK_CHARACTERS:]})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
