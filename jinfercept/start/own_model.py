"""The check of a model of one's own, before it serves: its config, and each of its functions on a few rows.

A function that is wrong would be served: tokens of other sequences in a row, or pages without keys and values, raise nowhere.
"""

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jinfercept.errors import ModelError, describe_failure, shown
from jinfercept.models.config import check_dimensions
from jinfercept.models.mesh import EVERYWHERE, mesh_of, specs_of
from jinfercept.models.protocol import MixedModel, Params, ServedModel, WindowedModel, states_of
from jinfercept.models.quantized import weights_of
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

_FIELDS = ("family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
_COMMON = [0, 1, 2], [0, 3, -1]
"""The calls of each function, and where each of them has the row that all have; other rows differ."""
_ONCE, _KV = "layer() calls attend once, with the kv that it got", "layer() returns the kv that attend returned"


def to_serve(value: object) -> str:
    """How to correct a value that is no model, for the `fix` of an error."""
    if isinstance(value, type):
        return f"give an instance, {value.__name__}(…), in place of the class"
    lacking = [name for name in ("config", "embed", "layer", "head") if not hasattr(value, name)]
    return f"give it {' and '.join(lacking)}, see docs/own_model.md" if len(lacking) < 4 else "give one of them"


def check_config(model: ServedModel) -> None:
    """Raise `ModelError` unless a model's config has all that memory, pages and executables are planned by."""
    config = model.config
    lacking = [field for field in (*_FIELDS, "eos_token_ids") if not hasattr(config, field)]
    _demand(not lacking, "the config of a model lacks attributes", f"no {', '.join(lacking)}")
    ends = config.eos_token_ids
    _demand(isinstance(ends, tuple), "eos_token_ids of the config are a tuple of token ids", shown(ends))
    check_dimensions(config)
    are_tokens = all(0 <= end < config.vocab_size for end in ends)
    _demand(are_tokens, f"eos_token_ids of the config are tokens below vocab_size, {config.vocab_size}", shown(ends))
    kinds = model.layer_kinds if isinstance(model, MixedModel) else ()
    are_kinds = isinstance(kinds, tuple) and len(kinds) in (0, config.num_layers)
    _demand(are_kinds, f"layer_kinds are () or a tuple of {config.num_layers} kinds, one for each layer", shown(kinds))


def check_functions(model: ServedModel, params: Params) -> None:
    """Raise `ModelError` for a function that is wrong: its outputs, or rows that depend on others or on their place.

    The weights `params` are on the devices that serve them.
    """
    config, like = model.config, weights_of(params.embed)[0]
    problem = "the embedding's first weight is of floating-point numbers: keys and values are kept in its dtype"
    _demand(jnp.issubdtype(like.dtype, jnp.floating), problem, f"{like.dtype}")
    width, vocab_size, mesh = config.hidden_size, config.vocab_size, mesh_of(like)
    sizes = {width, vocab_size, config.num_heads, config.num_kv_heads, config.head_dim, mesh.size}
    num_rows = next(number for number in count(5) if number not in sizes)
    random, shape = np.random.default_rng(0), (len(_COMMON[0]), num_rows)

    def run(name: str, function: Callable[..., Any], params: Any, *calls: tuple[Any, ...]) -> np.ndarray:
        whole = jax.jit(mesh.on_parts(function, specs_of((params, *calls[0])), EVERYWHERE))
        return _common_row(name, [partial(whole, params, *call) for call in calls])

    def embed(params: Any, tokens: Any, positions: Any) -> Any:
        return (_checked("embed() returns", model.embed(params, tokens, positions), (num_rows, width)),)

    def head(params: Any, x: Any) -> Any:
        return (_checked("head() returns", model.head(params, x), (num_rows, vocab_size), jnp.float32),)

    ends = vocab_size - 1, config.max_position - 1
    tokens, positions = (random.integers(0, end, shape, np.int32, endpoint=True) for end in ends)
    tokens[_COMMON], positions[_COMMON] = ends
    if mesh.size == 1:  # several devices have parts of a table, and rightly read out of their bounds
        read, out_of_bounds = jax.jit(checkify.checkify(embed, errors=checkify.index_checks)), ""
        with suppress(Exception):  # checkify does not know every function of JAX
            out_of_bounds = read(params.embed, tokens[0], positions[0])[0].get() or ""
        problem = (
            "embed() reads a table behind its end, where JAX reads another row: vocab_size or max_position is longer"
        )
        _demand(not out_of_bounds, problem, out_of_bounds.partition(". ")[0])
    embedded = run("embed", embed, params.embed, *zip(tokens, positions, strict=True))
    rows = random.normal(size=width) + 0.5 * random.normal(size=(*shape, width))
    rows[_COMMON] = rows[0, 0]
    rows = rows.astype(embedded.dtype)
    kinds, states = model.layer_kinds if isinstance(model, MixedModel) else (), states_of(model)
    for kind, index in {kind: index for index, kind in reversed([*enumerate(kinds or (None,))])}.items():
        if not (states and states[index]):  # such a layer carries the states of its rows on itself
            layer = partial(_layer, model, kind, mesh.size)
            run("layer", layer, params.layers[index], *zip(rows, positions, strict=True))
    run("head", head, params.head, *((x,) for x in rows))


def _layer(model: ServedModel, kind: Hashable, num_devices: int, params: Any, x: Any, positions: Any) -> Any:
    config, calls = model.config, list[Any]()
    most = model.layer_window(kind) if kind is not None and isinstance(model, WindowedModel) else None
    heads, kv_heads = config.num_heads // num_devices, config.num_kv_heads // num_devices

    # adds up queries, keys and values, and counts its calls in `kv`
    def attend(q: Any, k: Any, v: Any, kv: Any, /, scoring: Scoring = PLAIN) -> tuple[Any, Any]:
        for name, value, number in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
            _checked(f"{name} of attend in layer() is", value, (len(x), number, config.head_dim))
        if scoring.sinks is not None:
            _checked("sinks of attend in layer() are", scoring.sinks, (heads,))
        is_positive = all(number is None or number > 0 for number in scoring[:2])
        _demand(is_positive, "window and soft_cap of attend in layer() are above 0 or None", shown(scoring[:2]))
        is_near = most is None or (scoring.window is not None and scoring.window <= most)
        got = f"{scoring.window} for layers of kind {kind!r}"
        _demand(is_near, f"the window of attend is at most layer_window(), {most} tokens", got)
        _demand(not calls, _ONCE, "a second call")
        _demand(getattr(kv, "shape", None) == (1,), _ONCE, f"{_described(kv)} as kv")
        calls.append(kv + 1)
        return q + jnp.repeat(k + v, heads // kv_heads, axis=1).astype(q.dtype), calls[0]

    function = model.layer if kind is None else partial(cast(MixedModel, model).layer, kind=kind)
    returned = function(params, x, positions, jnp.zeros(1, jnp.int32), attend)
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    _demand(is_pair, "layer() returns x and kv", _described(returned))
    _checked("layer() returns", returned[0], x.shape, x.dtype)
    _demand(bool(calls), _ONCE, "no call")
    _demand(getattr(returned[1], "shape", None) == (1,), _KV, _described(returned[1]))
    return tuple(returned)


def _common_row(name: str, calls: list[Callable[[], Any]]) -> np.ndarray:
    # One row is in all calls, and has to come out the same in each.
    try:
        outputs = [[*map(np.asarray, call())] for call in calls]
    except ModelError:
        raise
    except Exception as error:
        failure = describe_failure(error)[:500]
        raise ModelError(f"{name}() of the model fails", got=failure, fix="see docs/own_model.md") from error
    first, *kv = outputs[0]
    _demand(not kv or kv[0][0] == 1, _KV, "that which layer() got")
    row, *again = np.stack([np.asarray(rows, np.float64) for rows, *_ in outputs])[_COMMON]
    problem = f"{name}() returns NaN for finite numbers: look for NaN among its weights"
    _demand(not np.isnan(row).any(), problem, "NaN")
    rounding = (1e-3 if first.dtype.itemsize > 2 else 5e-2) * np.abs(row[np.isfinite(row)]).max(initial=0.0)
    is_alike = np.allclose(again, row, rtol=0.0, atol=rounding, equal_nan=True)
    mixed = f"{name}() mixes rows, which belong to different sequences: attend alone sees other tokens"
    _demand(is_alike, mixed, "a row that changes with the rows beside it, or with its place among them")
    return first


def _checked(what: str, value: Any, shape: tuple[int, ...], dtype: Any = jnp.floating) -> Any:
    is_right = getattr(value, "shape", None) == shape and jnp.issubdtype(value.dtype, dtype)
    kind = "floating-point numbers" if dtype is jnp.floating else jnp.dtype(dtype).name
    _demand(is_right, f"{what} {[*shape]} of {kind}", _described(value))
    return value


def _described(value: Any) -> str:
    return f"{[*value.shape]} of {value.dtype}" if hasattr(value, "shape") else shown(value)


def _demand(is_right: bool, what: str, got: str) -> None:
    if not is_right:
        raise ModelError(what, got=got, fix="correct the model, see docs/own_model.md")
