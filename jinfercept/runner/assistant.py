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

from jinfercept.models.attention import cut_for
from jinfercept.models.gemma4 import is_assistant
from jinfercept.models.load import Loaded
from jinfercept.models.mesh import over_devices
from jinfercept.models.model import Model
from jinfercept.models.parallel import num_devices
from jinfercept.models.protocol import Params, ServedModel, Weights, kv_places
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.layouts.kv_rows import is_quantised
from jinfercept.pallas.layouts.pages import Batch
from jinfercept.pallas.layouts.rows import rms_normed
from jinfercept.runner.draft_layer import DraftRows, DraftSteps, row_queries
from jinfercept.runner.executables import Executables
from jinfercept.runner.layer_attention import step_attention
from jinfercept.runner.packing import PackedShape, in_place


class Assistant(NamedTuple):
    """A model that drafts for another one, with its weights; its config is `fitted` to that one."""

    model: Model
    params: Params

    def weights(self, served: Params) -> tuple[Any, ...]:
        """The weights that its executables read."""
        return self.params, served.embed, served.head["norm"]

    def pages(self, served: ServedModel, layers: Sequence[Any]) -> tuple[Any, ...]:
        """The pages that each of its layers reads.

        Args:
            layers: pages of the served model, by place, see `protocol.kv_places`.
        """
        places = kv_places(served)
        return tuple(layers[places[kind.kv_from]] for kind in self.model.layer_kinds if kind.kv_from is not None)


def as_assistant(drafting: Loaded[ServedModel] | None) -> Assistant | None:
    """What drafts beside a served model, if it is an assistant; None: there is nothing, or it is a draft model."""
    if drafting is None or not is_assistant(drafting.model.config):
        return None
    return Assistant(cast(Model, drafting.model), drafting.params)


def add_assistant(
    run: Executables, assistant: Assistant, served: Model, params: Params, steps: DraftSteps, layers: Sequence[Any]
) -> None:
    """Add the executable `draft layer` of each step, which writes the drafts of every row.

    Args:
        params: of the served model, arrays or shapes with shardings.
        layers: the served model's pages or their shapes, by place.
    """
    for step, shape in steps.packed.items():
        pages = assistant.pages(served, layers)
        arguments = *assistant.weights(params), *steps.arguments(step, pages)
        drafts = partial(_drafts, assistant.model, served, shape, steps)
        run.add(("draft layer", step, True), over_devices(drafts, arguments), *arguments)


def _drafts(
    assistant: Model,
    served: Model,
    shape: PackedShape,
    steps: DraftSteps,
    weights: Params,
    embed: Weights,
    norm: Float[Array, "E"],
    x: Float[Array, "T W"],
    rows: DraftRows,
    pages: tuple[Any, ...],
    packed: Batch | Int[Array, "upload"],
    common: Int[Array, "common"],
) -> tuple[Int[Array, "S drafts"], None]:
    """The drafts of every row, and no pages; `x` is the output of the served model's last layer."""
    batch, drafts, config = in_place(packed, shape), list[Int[Array, "S"]](), assistant.config
    x, last, tokens = (array.at[rows.last].get(mode="clip") for array in (x, batch.positions, rows.tokens))
    hidden = rms_normed(x[:, : len(norm)], norm, served.config.norm_eps)
    own_shape = shape._replace(num_tokens=shape.num_rows, joined=False, decode_only=True)
    embedding, head = assistant.assistant_ends(weights)
    attends = list[Any]()
    for kind, array in zip(config.kinds, pages, strict=True):
        sizes, of_pool = config.of_kind(kind), batch.of_windows if batch.window and kind.window else batch
        heads = Heads(sizes.num_heads // num_devices(), sizes.num_kv_heads // num_devices(), sizes.head_dim, x.itemsize)
        cut = cut_for(heads._replace(quantised=is_quantised(array.dtype)), shape.attention)
        attends.append(step_attention(own_shape, row_queries(of_pool, last + 1, cut), [], heads.num_kv_heads))
    for number in range(steps.num_drafts):
        with jax.named_scope(f"draft{number}"):
            y = embedding.joined(served.embed(embed, tokens, last + 1)[:, : len(norm)], hidden)
            for layer, kind, array, attend in zip(weights.layers, config.kinds, pages, attends, strict=True):
                y, _ = assistant.layer(layer, y, last + 1, array, attend, kind=kind)
            drafts.append(tokens := steps.drawn(head(y), rows, common, number))
            hidden = head.hidden(y)
    return jnp.stack(drafts, axis=1), None
