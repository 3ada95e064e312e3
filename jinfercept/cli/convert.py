"""`jinfercept convert`: any model that can be loaded, written once so that it loads quickly afterwards."""

import time
from pathlib import Path

import jax

from jinfercept.models.converted import write
from jinfercept.models.load import DTypeName, Loaded, load
from jinfercept.tokenizer.load import load_tokenizer


def convert(model: str, directory: str, *, dtype: DTypeName = "auto") -> int:
    """Write a model's weights in `dtype`, its config and its tokenizer into a directory; says what loading takes now.

    Returns the exit status.

    Raises:
        ModelError: the model cannot be loaded, or the directory holds one already.
    """
    target = Path(directory).expanduser()
    loaded, original_s = _timed(model, dtype)
    write(target, loaded.model, loaded.params)
    tokenizer = load_tokenizer(loaded.source)
    if tokenizer is not None:
        tokenizer.save(target)
    num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    del loaded
    again, converted_s = _timed(target, dtype)
    kind = jax.tree.leaves(again.params)[0].dtype
    print(
        f"{target}: {kind}, {num_bytes / 1e6:.0f} MB{'' if tokenizer else ', no tokenizer'}; "
        f"loads in {converted_s:.1f} s, the original in {original_s:.1f} s"
    )
    return 0


def _timed(model: str | Path, dtype: DTypeName) -> tuple[Loaded, float]:
    began_s = time.monotonic()
    loaded = load(model, dtype=dtype)
    jax.block_until_ready(loaded.params)
    return loaded, time.monotonic() - began_s
