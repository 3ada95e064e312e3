"""The settings of JAX under which models are loaded and served, whatever the caller of an engine has set.

A setting has a global value, and values of single threads, which come first. JAX caches the trace of a function by those that
change how it is traced, compiled or allowed to move arrays: with the same ones at the start and later, nothing compiles again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax

from jinfercept.errors import ConfigError

_OWN: tuple[tuple[Callable[[Any], AbstractContextManager[object]], Any], ...] = (
    (jax.enable_x64, False),
    (jax.disable_jit, False),
    (jax.numpy_dtype_promotion, "standard"),
    (jax.numpy_rank_promotion, "allow"),
    (jax.default_matmul_precision, None),
    (jax.allow_f16_reductions, True),
    (jax.softmax_custom_jvp, False),
    (jax.auto_pcast, True),
    (jax.remove_size_one_mesh_axis_from_type, False),
    (jax.default_prng_impl, "threefry2x32"),
    (jax.threefry_partitionable, True),
    (jax.enable_custom_prng, False),
    (jax.legacy_prng_key, "allow"),
    (jax.debug_key_reuse, False),
    (jax.debug_nans, False),
    (jax.debug_infs, False),
    (jax.check_tracer_leaks, False),
    (jax.enable_checks, False),
    (jax.no_tracing, False),
    (jax.no_execution, False),
    (jax.transfer_guard, "allow"),
    (jax.array_garbage_collection_guard, "allow"),
)
"""Context managers that set a setting for one thread, and the values of an engine."""


_REFUSED = {
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_error_checking_behavior_nan": "ignore",
    "jax_scan3": False,
}
"""Settings without a context manager, under which tokens differ or functions cannot be traced, and an engine's values."""


def check_settings() -> None:
    """Raise `ConfigError` for a setting that changes what an engine compiles, and that `own_settings` cannot set."""
    for name, value in _REFUSED.items():
        if (current := getattr(jax.config, name, value)) != value:
            fix = f"jax.config.update({name!r}, {value!r})"
            raise ConfigError(f"an engine does not work with JAX's setting {name}", got=current, fix=fix)
    if jax.config.jax_thread_guard and jax.process_count() > 1:
        raise ConfigError(
            "an engine on several hosts uses JAX in a thread of its own", got="jax_thread_guard", fix="turn it off"
        )


@contextmanager
def own_settings(device: Any = None) -> Iterator[None]:
    """Use the engine's settings of JAX in this thread, without a mesh. Arrays that have no place are made on `device`; None:
    the caller's default. Raises `ConfigError` if JAX traces a function in this thread."""
    with ExitStack() as stack:
        try:
            stack.enter_context(jax.set_mesh(None))
        except ValueError as error:
            raise ConfigError(
                "an engine does not work in a function that JAX traces", got=error, fix="call it outside of jax.jit"
            ) from error
        for setting, value in _OWN:
            stack.enter_context(setting(value))
        if device is not None:
            stack.enter_context(jax.default_device(device))
        yield
