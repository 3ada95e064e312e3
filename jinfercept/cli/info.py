"""`jinfercept info`, `convert` and `profile`: the shape of a model, a form that loads quickly, and its times here."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro import conf

from jinfercept.cli.options import Maybe, ModelName, Switch, engine_flags
from jinfercept.config import DTypeChoice, EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.sched.profile import Profile
from jinfercept.sim.reports import check_writable
from jinfercept.start.progress import StartDisplay

if TYPE_CHECKING:
    from jinfercept.models.config import ModelConfig
    from jinfercept.models.model import Model


@dataclass(frozen=True, kw_only=True)
class MeasureProfile:
    model: ModelName
    out: Maybe[str] = None
    """write the profile to this JSON file; engines on this machine find it without"""
    quick: Switch = False
    """only what an engine measures that starts without one"""
    engine: Annotated[EngineOptions, engine_flags("profile")]

    def run(self) -> int:
        """Measure, and print a summary; returns 0."""
        from jinfercept.llm import LLM

        if self.out:
            check_writable(self.out, "--out")
        options: EngineOptions = {**self.engine, "profile": "quick" if self.quick else "measure"}
        with StartDisplay(notes=True) as progress, LLM(self.model, progress=progress, **options) as llm:
            progress.close()
            measured = llm.profile
        print(_summary(measured))
        if self.out:
            measured.save(self.out)
            flag = f"--profile {self.out}"
            print(f"written to {self.out}: jinfercept serve MODEL {flag}, jinfercept simulate {flag}")
        return 0


def _summary(profile: Profile) -> str:
    decoding = [step for step in profile.tables["steps"] if step["depth"] is None]
    worst = {
        price: max(abs(step[price] / step["seconds"] - 1) for step in decoding) for price in ("profile_s", "line_s")
    }
    stairs = zip(profile.bucket_tokens, profile.bucket_s, strict=True)
    return "\n".join(
        (
            f"S: {profile.saturation} query tokens; the model's KV: {profile.kv_bytes_per_token:,} bytes per token",
            f"profile: {', '.join(f'{tokens}: {1e3 * seconds:.1f} ms' for tokens, seconds in stairs)}, and "
            f"{1e6 * profile.per_context_s:.2f} µs per context token, {1e9 * profile.per_pair_s:.0f} ns per query token of a "
            f"chunk and token before it; off by {worst['profile_s']:.0%} at most where rows decode",
            f"line: max({1e3 * profile.flat_s:.1f}, {1e3 * profile.fixed_s:.1f} + {1e3 * profile.per_query_s:.3f} · query "
            f"tokens) ms and the same for contexts; off by {worst['line_s']:.0%} at most",
            f"link: {profile.link_out_tokens_per_s:,.0f} tokens/s out, {profile.link_in_tokens_per_s:,.0f} in, "
            f"{profile.link_both_tokens_per_s:,.0f} both ways together, and {1e6 * profile.copy_s:.0f} µs a transfer",
            f"dispatch: {1e3 * profile.dispatch_s:.2f} ms a step; measured in {profile.tables['took_s']:.1f} s",
        )
    )


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


@dataclass(frozen=True)
class Info:
    model: ModelName
    tensor_parallel_size: Annotated[Maybe[int], conf.arg(aliases=("-tp",))] = None
    """devices among which the model is cut (default: 1)"""

    def run(self) -> int:
        """Print a table; returns 0."""
        import jax
        from rich.console import Console
        from rich.table import Table

        from jinfercept.models.gemma4 import check_alone
        from jinfercept.models.load import bytes_to_load, quantization_of, read_config
        from jinfercept.models.model import Model, kv_bytes_per_token, param_bytes
        from jinfercept.models.protocol import states_of
        from jinfercept.runner.page_transfers import slot_bytes
        from jinfercept.start.backend import start_backend

        start_backend("auto")

        num_devices = 1 if self.tensor_parallel_size is None else self.tensor_parallel_size
        if num_devices < 1:
            raise ConfigError("tensor_parallel_size is too small", got=num_devices, fix="at least 1")
        served = Model(read_config(self.model)).on_devices(num_devices)
        config = served.config
        check_alone(config)
        repeated = f", each of {config.num_kv_heads // served.kv_repeats} stored {served.kv_repeats} times"
        most = config.rope.long_max_position
        longer = f", up to {most:,} with --max-model-len" if most else ""  # what a longrope serves by its long factors
        table = Table(title=self.model, show_header=False)
        for name, value in (
            ("architecture", config.family),
            ("layers", config.num_layers),
            ("embedding", config.hidden_size),
            ("query heads × head dim", f"{config.num_heads} × {config.head_dim}"),
            ("KV heads", f"{config.num_kv_heads}{repeated if served.kv_repeats > 1 else ''}"),
            *_other_sizes(served),
            ("vocabulary", f"{config.vocab_size:,}"),
            ("longest sequence", f"{config.max_position:,}{longer}"),
            ("rotary scaling", config.rope.scaling),
            *_windows(config),
            *_recurrent(config),
            *(
                []
                if (experts := config.experts) is None
                else [("experts", f"{experts.per_token} of {experts.num_experts} compute a token")]
            ),
            ("devices", ", ".join(f"{device.platform} {device.id}" for device in jax.devices())),
        ):
            table.add_row(name, str(value))
        for dtype in ("float32", "bfloat16"):
            weights, token = param_bytes(config, dtype, num_devices), kv_bytes_per_token(config, dtype) / num_devices
            of_states = slot_bytes(states_of(served), dtype, num_devices)
            name = dtype if num_devices == 1 else f"{dtype}, on each of {num_devices} devices"
            states = f", states {_size(of_states)} per sequence" if of_states else ""
            states += _windowed(config, kv_bytes_per_token(config, dtype, windowed=True) / num_devices)
            table.add_row(name, f"weights {weights / 2**30:.2f} GiB, KV {token / 2**10:.0f} KiB per token{states}")
        if (kind := quantization_of(self.model)) is not None:
            try:
                weights = bytes_to_load(self.model, "bfloat16", num_devices, quantization=kind)
                table.add_row(f"--quantization {kind}", f"weights {weights / 2**30:.2f} GiB")
            except ConfigError as error:
                table.add_row(f"--quantization {kind}", str(error))
        Console().print(table)
        return 0


def _windows(config: "ModelConfig") -> list[tuple[str, str]]:
    windows = Counter(kind.window for kind in config.kinds if kind.window is not None)
    rows = (f"{count} of {config.num_layers} see {window:,} tokens" for window, count in windows.items())
    return [("windowed layers", row) for row in rows]


def _other_sizes(served: "Model") -> list[tuple[str, str]]:
    config, windowed = served.config, served.windowed_config
    own = f"{windowed.num_heads} × {windowed.head_dim}, {windowed.num_kv_heads} KV heads"
    rows = [("heads of windowed layers", own)] if windowed is not config else []
    num_shared = sum(kind.has_mixer and kind.kv_from is not None for kind in config.kinds)
    return rows + ([("layers without KV", f"the last {num_shared} read those of earlier ones")] if num_shared else [])


def _windowed(config: "ModelConfig", window_bytes: float) -> str:
    from jinfercept.start.side_pools import are_long

    windows = [kind.window for kind in config.kinds if kind.window is not None and kind.window < config.max_position]
    if not windows or len(windows) == config.num_layers or not are_long(windows, config.max_position):
        return ""
    return f", {window_bytes / 2**10:.0f} KiB of them for the last {max(windows):,} tokens only"


def _recurrent(config: "ModelConfig") -> list[tuple[str, str]]:
    count = sum(kind.is_recurrent for kind in config.kinds)
    if not count:
        return []
    return [("recurrent layers", f"{count} of {config.num_layers}")]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 2**10:.1f} KiB"
