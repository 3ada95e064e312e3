"""New weights for a model that is being served: checked against those that are there, and in their dtypes."""

from typing import Any

import jax

from jinfercept.errors import ModelError
from jinfercept.models.model import Model, tied
from jinfercept.models.protocol import Params, ServedModel


def replacement(model: ServedModel, params: Params, present: Params) -> Params:
    """Weights to be put in the place of others.

    Args:
        model: what is served; if its embeddings are tied, the head's are taken from the embedding.
        params: the new ones: any arrays, numpy's included.
        present: those that are there.

    Raises:
        ModelError: names a weight that is missing, that is too much, or that has another shape.
    """
    if not isinstance(params, Params) or not params.embed:
        raise ModelError("new weights are Params", got=type(params).__name__, fix="see models/protocol.py")
    if isinstance(model, Model):
        params = tied(model.config, params)
    new, old = _by_name(params), _by_name(present)
    for name in old.keys() ^ new.keys():
        what = "is missing" if name in old else "is none of the model's"
        raise ModelError(
            f"weight {name} {what}", got=f"{len(new)} weights for {len(old)}", fix="give the same structure"
        )
    for name, leaf in old.items():
        if getattr(new[name], "shape", None) != leaf.shape:
            got = getattr(new[name], "shape", type(new[name]).__name__)
            raise ModelError(f"weight {name} has another shape", got=got, fix=f"{leaf.shape}")
    return jax.tree.map(
        lambda leaf, like: leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype), params, present
    )


def _by_name(params: Params) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
