"""`jinfercept convert`: any model that can be loaded, written once so that it loads quickly afterwards."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro import conf

from jinfercept.cli.options import ModelName
from jinfercept.config import DTypeChoice

if TYPE_CHECKING:
    from jinfercept.models.load import Loaded


@dataclass(frozen=True)
class Convert:
    """The command."""

    model: ModelName
    directory: conf.Positional[str]
    """to write to; give it wherever a model is asked for"""
    dtype: DTypeChoice = "auto"
    """of the weights"""

    def run(self) -> int:
        """Write weights, config and tokenizer into the directory, and print the time that loading takes; returns 0.

        Raises:
            ModelError: the model cannot be loaded, or the directory holds one already.
            ConfigError: JAX does not start.
        """
        import jax

        from jinfercept.chat.tokenizer.load import load_tokenizer
        from jinfercept.models.converted import write
        from jinfercept.start.backend import start_backend

        start_backend("auto")

        target = Path(self.directory).expanduser()
        loaded, original_s = _timed(self.model, self.dtype)
        write(target, loaded.model, loaded.params)
        tokenizer = load_tokenizer(loaded.source)
        if tokenizer is not None:
            tokenizer.save(target)
        num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        del loaded
        again, converted_s = _timed(target, self.dtype)
        kind = jax.tree.leaves(again.params)[0].dtype
        print(
            f"{target}: {kind}, {num_bytes / 1e6:.0f} MB{'' if tokenizer else ', no tokenizer'}; "
            f"loads in {converted_s:.1f} s, the original in {original_s:.1f} s"
        )
        return 0


def _timed(model: str | Path, dtype: DTypeChoice) -> "tuple[Loaded, float]":
    import jax

    from jinfercept.models.load import load

    began_s = time.monotonic()
    loaded = load(model, dtype=dtype, quantization="none")
    jax.block_until_ready(loaded.params)
    return loaded, time.monotonic() - began_s
