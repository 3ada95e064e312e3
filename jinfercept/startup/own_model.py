"""The check of a model of one's own, before it serves: its config, and each of its functions on a few rows.

A function that is wrong would be served: tokens of other sequences in a row, or pages without keys and values, raise nowhere.
"""

from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.errors import ModelError, describe_failure, shown
from jinfercept.layouts.scoring import PLAIN, Scoring
from jinfercept.models.mesh import EVERYWHERE, mesh_of, specs_of
from jinfercept.models.protocol import MixedModel, Params, ServedModel, WindowedModel, states_of
from jinfercept.models.quantized import weights_of

_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
_FIX = "see docs/own_model.md for what {} takes and returns"
_RETURNS_KV = "layer() returns the kv that attend returned"
_ROW = 2
"""The row that both calls of a function have; all others differ."""


def check_config(model: ServedModel) -> None:
    """Raise `ModelError` unless a model's config has what memory, pages and executables are planned by."""
    config, name = model.config, type(model.config).__name__
    lacking = [field for field in ("family", *_SIZES, "eos_token_ids") if not hasattr(config, field)]
    if lacking:
        raise ModelError(
            "the config of a model lacks attributes", got=f"{name} without {', '.join(lacking)}", fix="add them"
        )
    for field in _SIZES:
        value = getattr(config, field)
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{field} of a model's config is a whole number above 0", got=shown(value), fix=f"correct {name}"
            )
    if config.num_heads % config.num_kv_heads:
        got = f"{config.num_heads} and {config.num_kv_heads}"
        raise ModelError("query heads must divide evenly among KV heads", got=got, fix=f"correct {name}")
    ends = config.eos_token_ids
    if not isinstance(ends, tuple) or not all(isinstance(end, int | np.integer) for end in ends):
        raise ModelError(
            "eos_token_ids of a model's config are a tuple of token ids", got=shown(ends), fix=f"correct {name}"
        )
    kinds = model.layer_kinds if isinstance(model, MixedModel) else ()
    if not isinstance(kinds, tuple) or len(kinds) not in (0, config.num_layers):
        problem = f"layer_kinds are a tuple of a kind for each of {config.num_layers} layers, or ()"
        raise ModelError(problem, got=shown(kinds), fix=f"correct {type(model).__name__}")


def check_functions(model: ServedModel, params: Params) -> None:
    """Raise `ModelError` for a function that returns something else than it should, or whose rows depend on each other.

    Args:
        params: on the devices that serve them.
    """
    config, like = model.config, weights_of(params.embed)[0]
    if not jnp.issubdtype(like.dtype, jnp.floating):
        raise ModelError(
            "the embedding's first weight is of floating-point numbers: keys and values are kept in its dtype",
            got=f"{next(iter(params.embed))} of {like.dtype}",
            fix="give weights of a floating-point dtype",
        )
    width, vocab_size = config.hidden_size, config.vocab_size
    sizes = {width, vocab_size, config.num_heads, config.num_kv_heads, config.head_dim, mesh_of(like).size}
    num_rows = next(number for number in count(5) if number not in sizes)
    random, at = np.random.default_rng(0), np.arange(num_rows) == _ROW
    given = [random.integers(0, config.max_position, num_rows) for _ in range(2)]
    positions = [np.where(at, config.max_position - 1, some).astype(np.int32) for some in given]
    given = [random.integers(0, vocab_size, num_rows) for _ in range(2)]
    tokens = [np.where(at, vocab_size - 1, some).astype(np.int32) for some in given]

    def embed(params: Any, tokens: Any, positions: Any) -> Any:
        return (_checked("embed", model.embed(params, tokens, positions), (num_rows, width), None),)

    def head(params: Any, x: Any) -> Any:
        return (_checked("head", model.head(params, x), (num_rows, vocab_size), jnp.float32),)

    def run(name: str, function: Callable[..., Any], params: Any, *calls: tuple[Any, ...]) -> np.ndarray:
        return _run(
            name, jax.jit(mesh_of(like).on_parts(function, specs_of((params, *calls[0])), EVERYWHERE)), params, calls
        )

    embedded = run("embed", embed, params.embed, *zip(tokens, positions, strict=True))
    if np.isnan(embedded[_ROW]).any():
        got = f"NaN for token {vocab_size - 1} at position {config.max_position - 1}"
        raise ModelError(
            "embed() has no vector for the last token or position", got=got, fix="correct vocab_size or max_position"
        )
    dtype = embedded.dtype
    row = random.normal(size=width)
    rows = [(np.where(at[:, None], row, random.normal(size=(num_rows, width))).astype(dtype),) for _ in range(2)]
    kinds = model.layer_kinds if isinstance(model, MixedModel) else ()
    first_of = {kind: index for index, kind in reversed([*enumerate(kinds or (None,))])}
    states = states_of(model)
    for kind, index in first_of.items():
        if states and states[index]:
            continue  # its rows are those of `StateRows`, which it carries on itself
        layer = partial(_layer, model, kind, mesh_of(like).size)
        calls = [(*x, where) for x, where in zip(rows, positions, strict=True)]
        run("layer", layer, params.layers[index], *calls)
    run("head", head, params.head, *rows)


def _layer(model: ServedModel, kind: Hashable, num_devices: int, params: Any, x: Any, positions: Any) -> Any:
    config, calls = model.config, list[Any]()
    most = model.layer_window(kind) if kind is not None and isinstance(model, WindowedModel) else None
    num_heads, num_kv_heads = config.num_heads // num_devices, config.num_kv_heads // num_devices

    def attend(q: Any, k: Any, v: Any, kv: Any, /, scoring: Scoring = PLAIN) -> tuple[Any, Any]:
        for name, value, heads in (("q", q, num_heads), ("k", k, num_kv_heads), ("v", v, num_kv_heads)):
            _checked(f"layer: {name} of attend", value, (len(x), heads, config.head_dim), None)
        if scoring.sinks is not None:
            _checked("layer: sinks of attend", scoring.sinks, (num_heads,), None)
        if most is not None and not (scoring.window and scoring.window <= most):
            got = f"{scoring.window} for layers of kind {kind!r}"
            raise _wrong(f"the window of attend is at most layer_window(), {most} tokens", got, "layer()")
        if getattr(kv, "shape", None) != (1,) or calls:
            got = "a second call" if calls else f"{_described(kv)} as kv"
            raise _wrong("layer() calls attend once, with the kv that it got", got, "layer()")
        calls.append(kv + 1)
        return q + jnp.repeat(k + v, num_heads // num_kv_heads, axis=1).astype(q.dtype), calls[-1]

    function = model.layer if kind is None else partial(cast(MixedModel, model).layer, kind=kind)
    returned = function(params, x, positions, jnp.zeros(1, jnp.int32), attend)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise _wrong("layer() returns x and kv", _described(returned), "layer()")
    _checked("layer", returned[0], x.shape, x.dtype)
    if not calls:
        raise _wrong("layer() calls attend once, with the kv that it got", "no call", "layer()")
    if getattr(returned[1], "shape", None) != (1,):
        raise _wrong(_RETURNS_KV, _described(returned[1]), "layer()")
    return tuple(returned)


def _run(name: str, whole: Callable[..., Any], params: Any, calls: tuple[tuple[Any, ...], ...]) -> np.ndarray:
    """What a function gives for the first of two calls. Raises `ModelError` if their common row differs in the second."""
    try:
        (first, *kv), (second, *_) = (map(np.asarray, whole(params, *call)) for call in calls)
    except ModelError:
        raise
    except Exception as error:
        raise _wrong(f"{name}() of the model fails", describe_failure(error)[:500], f"{name}()") from error
    if kv and kv[0][0] != 1:
        raise _wrong(_RETURNS_KV, "that which layer() got", "layer()")
    row, again = (np.asarray(rows[_ROW], np.float64) for rows in (first, second))
    rounding = 1e-3 if first.dtype.itemsize > 2 else 5e-2
    if not np.allclose(
        row, again, rtol=rounding, atol=rounding * np.abs(row[np.isfinite(row)]).max(initial=0.0), equal_nan=True
    ):
        raise ModelError(
            f"{name}() mixes rows, which belong to different sequences",
            got="a row that changes with the rows beside it",
            fix="compute each row by itself: attend alone sees other tokens",
        )
    return first


def _checked(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of this shape and dtype, None: any of floating-point numbers. Raises `ModelError` for anything else."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    if (
        not is_array
        or value.shape != shape
        or not jnp.issubdtype(value.dtype, jnp.floating if dtype is None else dtype)
    ):
        kind = "floating-point numbers" if dtype is None else jnp.dtype(dtype).name
        function, _, argument = name.partition(": ")
        what = f"{argument} in layer() is" if argument else f"{function}() returns"
        raise _wrong(f"{what} {[*shape]} of {kind}", _described(value), f"{function}()")
    return value


def _described(value: Any) -> str:
    return f"{[*value.shape]} of {value.dtype}" if hasattr(value, "shape") else shown(value)


def _wrong(what: str, got: str, function: str) -> ModelError:
    return ModelError(what, got=got, fix=_FIX.format(function))
