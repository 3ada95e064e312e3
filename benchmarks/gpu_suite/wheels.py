"""`tools/gpu_wheels FOLDER`: fetches the wheels that the project needs beyond JAX, Flax and Transformers, and FlashInfer's, for
Linux on x86-64.

A machine for GPUs has these three with what they need to be imported; what else the project depends on is small. Run it where
pip finds a package index; it prints the line that installs the wheels on a machine without network.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu_suite.parts import FLASHINFER
from benchmarks.suite.parts import PROJECT

PEER = "flashinfer-python==0.6.13"
"""A peer that is brought along without most of what it depends on."""
PRESENT = ("jax", "flax", "transformers")
"""Packages that a machine for GPUs has, with their dependencies."""
ALWAYS = ("pydantic",)
"""Packages that come along with what they need, although a command of `PRESENT` does too: machines lack them."""
NEVER = ("pip",)
"""Dependencies that only a machine with a network uses."""
GLIBC = (35, 34, 31, 28, 27, 24, 17)
"""Minor versions of the C library of the tags that pip may choose."""
TARGET = "build/gpu-packages"
MOST_BYTES = 32 << 20
MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the folder; returns the exit status: 2 without one folder, 1 if the wheels are too large or pip fails."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1 or words[0].startswith("-"):
        is_help = words in (["-h"], ["--help"])
        print("usage: tools/gpu_wheels FOLDER", file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    folder = Path(words[0])
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        present = _resolved(PRESENT).keys() - _resolved(ALWAYS).keys() | {*NEVER}
        wanted = _resolved([*project["dependencies"], *FLASHINFER[1:]])
        names = [f"{name}=={version}" for name, version in wanted.items() if name not in present]
        names.append(PEER)
        _pip("download", "--quiet", "--no-deps", *_tags(), "--dest", str(folder), *names)
    except subprocess.CalledProcessError as error:
        print(f"gpu_wheels: pip failed: {error.stderr.strip()[-2000:]}", file=sys.stderr)
        return 1
    wheels = sorted(folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:6.2f} MiB  {wheel.name}")
    print(f"{total / MIB:6.2f} MiB in {len(wheels)} wheels. There, in the checkout, before tools/gpu_suite:")
    print(f"python3 -m pip install --no-index --no-deps --no-compile --target {TARGET} {folder}/*.whl")
    if total > MOST_BYTES:
        print(f"gpu_wheels: more than {MOST_BYTES // MIB} MiB", file=sys.stderr)
    return int(total > MOST_BYTES)


def _resolved(requirements: Iterable[str]) -> dict[str, str]:
    """Versions by name of what pip would install for these, their dependencies included."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = ["--dry-run", "--quiet", "--ignore-installed", "--report", str(report), "--target", folder]
        _pip("install", *flags, *_tags(), *requirements)
        packages = [package["metadata"] for package in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {package["name"].lower().replace("_", "-"): package["version"] for package in packages}


def _tags() -> list[str]:
    """Wheels alone, for CPython 3.12 on Linux."""
    platforms = [word for minor in GLIBC for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    chosen = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    return [*chosen, *platforms, "--platform", "manylinux2014_x86_64"]


def _pip(*words: str) -> None:
    """Run pip. Raises `CalledProcessError` if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
