"""`jinfercept convert`: writes a model once in a form that loads quickly."""

from dataclasses import dataclass
from pathlib import Path

from tyro import conf

from jinfercept.cli.options import ModelName
from jinfercept.config import DTypeChoice


@dataclass(frozen=True)
class Convert:
    model: ModelName
    directory: conf.Positional[str]
    """to write to; give it wherever a model is asked for"""
    dtype: DTypeChoice = "auto"
    """of the weights"""

    def run(self) -> int:
        """Write weights, config and tokenizer into the directory; returns 0.

        Raises:
            ModelError: the model cannot be loaded, or the directory holds a model already.
            ConfigError: JAX does not start.
        """
        import jax

        from jinfercept.chat.tokenizer.load import load_tokenizer
        from jinfercept.models.converted import write
        from jinfercept.models.load import load
        from jinfercept.start.backend import start_backend

        start_backend("auto")

        target = Path(self.directory).expanduser()
        loaded = load(self.model, dtype=self.dtype, quantization="none")
        write(target, loaded.model, loaded.params)
        tokenizer = load_tokenizer(loaded.source)
        if tokenizer is not None:
            tokenizer.save(target)
        num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        kind = jax.tree.leaves(loaded.params)[0].dtype
        print(f"{target}: {kind}, {num_bytes / 1e6:.0f} MB{'' if tokenizer else ', no tokenizer'}")
        return 0
