"""`vllm bench serve` for an interpreter that has vLLM's modules, under whatever name of a package."""

import argparse
from importlib import import_module
from typing import Any

bench: Any = import_module("vllm.benchmarks.serve")
parser = argparse.ArgumentParser()
bench.add_cli_args(parser)
bench.main(parser.parse_args())
