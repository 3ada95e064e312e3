"""The assistant that drafts (Gemma 4): a small model behind a step's draws, whose layers read the served model's keys and
values.

It keeps nothing of its own: all drafts of a row attend to the tokens before the row's last draw, and have the position of that
draw. So a row has drafts whatever its sequence did before. The assistant drafts with the temperature and the random numbers of
the request's own draws.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.models.assistant import is_assistant
from jinfercept.models.attention import cut_for
from jinfercept.models.config import LayerKind
from jinfercept.models.mesh import over_devices
from jinfercept.models.model import Model
from jinfercept.models.parallel import num_devices
from jinfercept.models.protocol import Params, ServedModel, Weights, kv_places
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.layouts.kv_rows import is_quantised
from jinfercept.pallas.layouts.pages import Batch
from jinfercept.runner.draft_layer import DraftRows, DraftSteps, draft_samples, row_queries
from jinfercept.runner.executables import Executables
from jinfercept.runner.layer_attention import step_attention
from jinfercept.runner.packing import PackedShape, in_place
from jinfercept.runner.sampling import sample


class Assistant(NamedTuple):
    """A model that drafts for another one, with its weights; its config is `fitted` to that one."""

    model: Model
    params: Params


def as_assistant(model: ServedModel, params: Params) -> Assistant | None:
    """What drafts beside a served model, if it is an assistant; None: it is a draft model."""
    return Assistant(cast(Model, model), params) if is_assistant(model.config) else None


def pages_read(assistant: Assistant, served: ServedModel, layers: Sequence[Any]) -> tuple[Any, ...]:
    """The pages that each layer of an assistant reads.

    Args:
        layers: the served model's, by place, see `protocol.kv_places`.
    """
    places = kv_places(served)
    return tuple(layers[places[kind.kv_from]] for kind in assistant.model.layer_kinds if kind.kv_from is not None)


def add_assistant(
    run: Executables,
    assistant: Assistant,
    served: Model,
    params: Params,
    steps: DraftSteps,
    layers: Sequence[Any],
    windows: tuple[int, ...],
) -> None:
    """Add the executable `draft layer` of each step, which writes the drafts of every row.

    Args:
        params: of the served model, arrays or shapes with shardings.
        layers: the served model's pages or their shapes, by place.
        windows: by layer of the served model, see `pool_windows`.
    """
    pages = pages_read(assistant, served, layers)
    for step, shape in steps.packed.items():
        arguments = assistant.params, params.embed, params.head["norm"], *steps.arguments(step, pages)
        drafts = partial(_drafts, assistant.model, served, shape, steps, windows)
        run.add(("draft layer", step, True), over_devices(drafts, arguments), *arguments)


def _drafts(
    assistant: Model,
    served: Model,
    shape: PackedShape,
    steps: DraftSteps,
    windows: tuple[int, ...],
    weights: Params,
    embed: Weights,
    norm: Float[Array, "E"],
    x: Float[Array, "T W"],
    rows: DraftRows,
    pages: tuple[Any, ...],
    packed: Batch | Int[Array, "upload"],
    common: Int[Array, "common"],
) -> Int[Array, "S drafts"]:
    """The drafts of every row; `x` is the output of the served model's last layer."""
    batch, drafts = in_place(packed, shape), list[Int[Array, "S"]]()
    draws = draft_samples(steps.common, common, rows)
    x, last = (array.at[rows.last].get(mode="clip") for array in (x, batch.positions))
    tokens, hidden = rows.tokens.at[rows.last].get(mode="clip"), served.hidden(norm, x)
    own_shape = shape._replace(num_tokens=shape.num_rows, joined=False, decode_only=True)

    def compute(y: Float[Array, "S E"], layer: Weights, kind: LayerKind, pages: Any) -> Float[Array, "S E"]:
        sizes, of_pool = assistant.config.of_kind(kind), batch.of_windows if windows[kind.kv_from or 0] else batch
        heads = Heads(
            sizes.num_heads // num_devices(), sizes.num_kv_heads // num_devices(), sizes.head_dim, y.dtype.itemsize
        )
        cut = cut_for(heads._replace(quantised=is_quantised(pages.dtype)), shape.attention)
        attend = step_attention(own_shape, row_queries(of_pool, last + 1, cut), [], heads.num_kv_heads)
        return assistant.layer(layer, y, last + 1, pages, attend, kind=kind)[0]

    for number in range(steps.num_drafts):
        with jax.named_scope(f"draft{number}"):
            vectors = served.embed(embed, tokens, last + 1)[:, : hidden.shape[1]]
            y = assistant.assistant_inputs(weights.embed, vectors, hidden)
            for layer in zip(weights.layers, assistant.layer_kinds, pages, strict=True):
                y = compute(y, *layer)
            logits = assistant.head(weights.head, y)[:, : steps.num_drawn]
            tokens, _ = sample(logits, draws._replace(position=draws.position + 1 + number), "drawn")
            drafts.append(tokens := jnp.maximum(tokens, 0))
            hidden = assistant.assistant_hidden(weights.head, y)
    return jnp.stack(drafts, axis=1)
