"""`jinfercept bench copying`: decode tokens per second with and without drafts, where requests copy from their prompts."""

from dataclasses import dataclass
from typing import Annotated

from rich.console import Console

from jinfercept.bench.copying import measure_copying
from jinfercept.cli.options import HOSTS, ModelName, Several, engine_flags
from jinfercept.config import EngineOptions, SpeculativeConfig
from jinfercept.errors import ConfigError
from jinfercept.sim.tables import check_least, numbers, plain_table, show
from jinfercept.startup.progress import StartDisplay


@dataclass(frozen=True, kw_only=True)
class Copying:
    """The command."""

    model: ModelName
    batch: Several = ()
    """requests at once (default: 1,8)"""
    new_tokens: int = 128
    """tokens that each generates"""
    engine: Annotated[EngineOptions, engine_flags("max_num_seqs", *HOSTS)]

    def run(self) -> int:
        """Measure, and print a table; returns 0. Raises `ConfigError` for options that make no sense."""
        batches = numbers("--batch", self.batch or ("1,8",), int)
        check_least("--batch", batches[0], 1)
        check_least("--new-tokens", self.new_tokens, 2)
        given = self.engine.get("speculative_config") or '{"num_speculative_tokens": 7}'
        drafts = SpeculativeConfig.parse(given)._asdict()
        console = Console(stderr=True)
        from jinfercept.llm import LLM

        options: EngineOptions = {**self.engine, "max_num_seqs": max(batches), "speculative_config": drafts}
        with StartDisplay() as start, LLM(self.model, lazy=False, progress=start, **options) as llm:
            start.close()
            if llm.tokenizer is None:
                raise ConfigError("texts are copied", got="a model without a tokenizer", fix="give one that has one")
            with console.status("copying"):
                cells = measure_copying(llm, batches, self.new_tokens, drafts)
        columns = ("batch", "without drafts", "with", "×", "tokens per step", "drafts accepted", "same tokens")
        shown = plain_table(columns, caption="decoded tokens/s")
        for cell in cells:
            plain, drafted = cell.plain_tokens_per_s, cell.drafted_tokens_per_s
            shown.add_row(
                str(cell.batch),
                f"{plain:.1f}",
                f"{drafted:.1f}",
                f"{drafted / plain:.2f}",
                f"{cell.tokens_per_step:.2f}",
                f"{cell.accepted_share:.0%}",
                f"{cell.same_tokens} of {cell.batch}",
            )
        show(shown)
        return 0
