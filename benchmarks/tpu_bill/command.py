"""`python -m benchmarks tpu-bill`: the flags, which are read without JAX."""

from dataclasses import dataclass

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TpuBill:
    """The command."""

    sample: Switch = False
    """compile a few executables of one model only"""
    tpu: Several = ()
    """generation, of v4, v5e, v5p, v6e and tpu7x; repeatable (default: all)"""
    check: Switch = False
    """compare with benchmarks/tpu_bill/budgets.toml; the exit status is 1 if a budget is broken"""
    set_budgets: Switch = False
    """write what was compiled into benchmarks/tpu_bill/budgets.toml"""
    out: Maybe[str] = None
    """write the bill to this path with .json behind it"""

    def run(self) -> int:
        """Make the bill; returns the exit status. Raises `ConfigError` for an unknown generation."""
        from benchmarks.tpu_bill.bill import tpu_bill
        from benchmarks.tpu_bill.cases import TPUS

        if unknown := [name for name in self.tpu if name not in TPUS]:
            raise ConfigError("no such generation of TPUs", got=", ".join(unknown), fix=f"one of {', '.join(TPUS)}")
        names = self.tpu or TPUS
        return tpu_bill(sample=self.sample, check=self.check, set_budgets=self.set_budgets, tpus=names, out=self.out)
