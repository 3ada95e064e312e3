"""`python -m benchmarks gpu-bill`: the flags, which are read without JAX."""

from dataclasses import dataclass

from jinfercept.cli.options import Maybe, Switch
from jinfercept.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GpuBill:
    """The command."""

    full: Switch = False
    """compile every model, number of rows, GPU and way of multiplying (default: a set of a few minutes)"""
    sample: Switch = False
    """compile one bucket of one model only"""
    check: Switch = False
    """compare with benchmarks/gpu_bill/budgets.toml; the exit status is 1 if a budget is broken"""
    set_budgets: Switch = False
    """write what was compiled into benchmarks/gpu_bill/budgets.toml, with --full"""
    out: Maybe[str] = None
    """write the bill to this JSON file"""

    def run(self) -> int:
        """Make the bill; returns the exit status."""
        from benchmarks.gpu_bill.bill import gpu_bill

        if self.full and self.sample:
            raise ConfigError("--full and --sample exclude each other", got="both", fix="give one")
        if self.set_budgets and not self.full:
            raise ConfigError("--set-budgets needs every case", got="a part of them", fix="give --full")
        return gpu_bill(
            full=self.full, sample=self.sample, check=self.check, set_budgets=self.set_budgets, out=self.out
        )
