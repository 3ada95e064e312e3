"""`jinfercept info`: a model's shape and memory, without loading it."""

from dataclasses import dataclass

from jinfercept.cli.options import ModelName


@dataclass(frozen=True)
class Info:
    """The command."""

    model: ModelName

    def run(self) -> int:
        """Print a table; returns 0."""
        import jax
        from rich.console import Console
        from rich.table import Table

        from jinfercept.models.load import read_config
        from jinfercept.models.model import kv_bytes_per_token, param_bytes

        config = read_config(self.model)
        table = Table(title=self.model, show_header=False)
        for name, value in (
            ("architecture", config.family),
            ("layers", config.num_layers),
            ("embedding", config.hidden_size),
            ("query heads × head dim", f"{config.num_heads} × {config.head_dim}"),
            ("KV heads", config.num_kv_heads),
            ("vocabulary", f"{config.vocab_size:,}"),
            ("longest sequence", f"{config.max_position:,}"),
            ("rotary scaling", config.rope.scaling),
            ("devices", ", ".join(f"{device.platform} {device.id}" for device in jax.devices())),
        ):
            table.add_row(name, str(value))
        for dtype in ("float32", "bfloat16"):
            weights, token = param_bytes(config, dtype), kv_bytes_per_token(config, dtype)
            table.add_row(dtype, f"weights {weights / 2**30:.2f} GiB, KV {token / 2**10:.0f} KiB per token")
        Console().print(table)
        return 0
