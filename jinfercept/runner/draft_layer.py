"""Drafts behind a step's draws, by a layer of the model itself (multi-token prediction) or by an assistant (Gemma 4).

Both draft with the temperature and the random numbers of the request's own draws.

The layer that drafts reads every token of the step with the one after it, keeps keys and values of its own for them, and writes
drafts of the tokens behind the draws. Its pages are those of one more layer of the model's pool: they move and are shared with
the others. What it has of a page's last token depends on the token behind the page, which may be another one in a context that
shares the page: that costs accepted drafts, and no exactness. Drafts behind the first one are computed a token of each row at a
time. What the layer keeps for these is overwritten in the next step. It has no place behind the row's last page: such a token
sees only those before it.

The assistant is a small model whose layers read the served model's keys and values. It keeps nothing of its own: all drafts of
a row attend to the tokens before the row's last draw, and have the position of that draw. So a row has drafts whatever its
sequence did before.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.models.adapted import for_rows
from jinfercept.models.attention import cut_for
from jinfercept.models.gemma4 import is_assistant
from jinfercept.models.load import Loaded
from jinfercept.models.mesh import EVERYWHERE, over_devices, specs_of
from jinfercept.models.model import Model
from jinfercept.models.parallel import num_devices
from jinfercept.models.protocol import Params, ServedModel, Weights, kv_places
from jinfercept.pallas.layouts.kv_rows import is_quantised
from jinfercept.pallas.layouts.pages import OUT_OF_RANGE, Batch
from jinfercept.pallas.layouts.rows import rms_normed
from jinfercept.pallas.tiles import Heads
from jinfercept.pallas.work_schedule import Work, WorkCut, even_schedule
from jinfercept.runner.executables import Executables
from jinfercept.runner.layer_attention import step_attention
from jinfercept.runner.packing import CommonShape, PackedShape, Step, in_place
from jinfercept.runner.packing_samples import unpack_samples
from jinfercept.runner.sampling import SampleRows, sample


class DraftRows(NamedTuple):
    """Where rows draft.

    Attributes:
        tokens: behind every token of the step.
        last: of every row, the token behind whose successor it drafts; the number of tokens if it drafts nothing.
        draw: of every row, the sampled row of that token.
    """

    tokens: Int[Array, "T"]
    last: Int[Array, "S"]
    draw: Int[Array, "S"]


class DraftSteps(NamedTuple):
    """The steps behind whose draws there are drafts.

    Attributes:
        packed: their sizes, see `steps.step_shapes`.
        x_by_size: the shape of the last layer's output, by tokens of the bucket.
        common: the common part of the uploads.
        batches: what the layers read of each step's batch, its shapes.
        num_drafts: that are written behind each draw.
        num_drawn: see `RunnerShape`.
    """

    packed: Mapping[Step, PackedShape]
    x_by_size: Mapping[int, jax.ShapeDtypeStruct]
    common: CommonShape
    batches: Mapping[Step, Any]
    num_drafts: int
    num_drawn: int | None

    def arguments(self, step: Step, pages: Any) -> tuple[Any, ...]:
        """What an executable of a step reads beside weights: the last layer's output, the `DraftRows`, these pages, the batch,
        and the common part of the upload."""
        shape = self.packed[step]
        sizes: Any = map(self._ints, (shape.num_tokens, shape.num_rows, shape.num_rows))
        rows = DraftRows(*sizes)
        return self.x_by_size[step[0]], rows, pages, self.batches[step], self._ints(self.common.size)

    def add_rows(self, run: Executables, row_counts: tuple[int, ...]) -> None:
        """Add the executable `draft rows` of each step and number of sampled rows, which returns the step's `DraftRows`."""
        for step, shape in self.packed.items():
            for count in [count for count in row_counts if count <= step[0]]:
                arguments = self.batches[step], self._ints(self.common.size), self._ints(count)
                rows = over_devices(partial(_rows, shape, self.common), arguments)
                run.add(("draft rows", step, count), rows, *arguments)

    def drawn(
        self, logits: Float[Array, "S V"], rows: DraftRows, common: Int[Array, "common"], number: int
    ) -> Int[Array, "S"]:
        """The draft of this number of every row, drawn as the token was that the row drafts behind; 0 where none can be."""
        draws = unpack_samples(self.common.samples(common, self.common.num_rows))
        draws = SampleRows(*(field[rows.draw] for field in draws))
        draws = draws._replace(position=draws.position + 1 + number)
        return jnp.maximum(sample(logits[:, : self.num_drawn], draws, "drawn")[0], 0)

    def _ints(self, count: int) -> jax.ShapeDtypeStruct:
        home = next(iter(self.x_by_size.values())).sharding
        return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=home)


def add_draft_layer(run: Executables, model: Model, params: Params, steps: DraftSteps, pages: Any) -> None:
    """Add the executables `draft layer` of each step, with drafts and without.

    Args:
        params: arrays, or shapes with shardings.
        pages: of the layer, an array or its shape.
    """
    for step, shape in steps.packed.items():
        arguments = params.layers[-1], params.embed, params.head, *steps.arguments(step, pages)
        for number in (0, steps.num_drafts):
            compute = partial(_drafts, model, shape, steps._replace(num_drafts=number))
            whole = over_devices(compute, arguments, (EVERYWHERE, specs_of(pages)))
            run.add(("draft layer", step, number > 0), whole, *arguments, donate=(5,))


def row_queries(batch: Batch, contexts: Int[Array, "S"], cut: WorkCut | None) -> Batch:
    """A batch of a query of every row behind the tokens of these contexts, which writes no keys and values.

    Args:
        batch: of the step.
        cut: how attention cuts it; None if that has no work schedules.
    """
    count, nowhere = len(contexts), OUT_OF_RANGE + jnp.arange(len(contexts))
    numbers = jnp.arange(count + 1), contexts, batch.page_tables, jnp.asarray(count, jnp.int32)
    work = None if cut is None else Work(*numbers, even_schedule(contexts, cut), None)
    return Batch(nowhere, contexts - 1, nowhere, *numbers, work=work)


def _rows(
    shape: PackedShape,
    common_shape: CommonShape,
    packed: Batch | Int[Array, "upload"],
    common: Int[Array, "common"],
    drawn: Int[Array, "R"],
) -> DraftRows:
    """What follows every token: the token drawn there, else the one in the batch."""
    batch, size = in_place(packed, shape), shape.num_tokens
    draws = unpack_samples(common_shape.samples(common, len(drawn)))
    place = jnp.where(draws.position > 0, draws.token_index, size)  # padding draws at position 0
    draw = jnp.full(size, -1).at[place].set(jnp.arange(len(drawn)), mode="drop")
    is_drawn = draw >= 0
    following = jnp.maximum(jnp.where(is_drawn, drawn[draw], batch.following), 0)  # 0 where none could be drawn
    row = jnp.searchsorted(batch.query_starts[1:], jnp.arange(size), side="right", method="compare_all")
    has_draft = jnp.append(row[1:] == row[:-1], jnp.zeros(1, bool))
    is_last = is_drawn & ~(has_draft & (jnp.roll(batch.tokens, -1) == following))
    last = jnp.full(shape.num_rows, size).at[jnp.where(is_last, row, shape.num_rows)].min(jnp.arange(size), mode="drop")
    return DraftRows(following, last, draw.at[last].get(mode="clip"))


def _drafts(
    model: Model,
    shape: PackedShape,
    steps: DraftSteps,
    weights: Weights,
    embed: Weights,
    head: Weights,
    x: Float[Array, "T E"],
    rows: DraftRows,
    pages: Any,
    packed: Batch | Int[Array, "upload"],
    common: Int[Array, "common"],
) -> tuple[Int[Array, "S drafts"], Any]:
    """The drafts of every row, if there are some, and the layer's pages with all tokens of the step; `x` is the output of the
    layer before."""
    batch = in_place(packed, shape)
    with jax.named_scope("draft"):
        x, pages = _computed(model, shape, weights, embed, x, head["norm"], rows.tokens, pages, batch)
    page_size, num_rows = pages.shape[1], shape.num_rows
    if not steps.num_drafts:
        return jnp.zeros((num_rows, 0), jnp.int32), pages
    norm, drafts, own_shape = (
        weights["draft_norm"],
        [],
        shape._replace(num_tokens=num_rows, joined=False, decode_only=True),
    )
    position = batch.positions.at[rows.last].get(mode="clip")
    room = -(-batch.context_lens // page_size) * page_size  # tokens that the row's pages have room for
    x, every_row = x.at[rows.last].get(mode="clip"), jnp.arange(num_rows)
    for number in range(steps.num_drafts):
        with jax.named_scope(f"draft{number}"):
            logits = model.head({**head, "norm": norm}, x)
            drafts.append(tokens := steps.drawn(logits, rows, common, number))
            if number == steps.num_drafts - 1:
                break
            position = position + 1
            is_kept = (rows.last < shape.num_tokens) & (position < room)
            page = batch.page_tables[every_row, jnp.where(is_kept, position // page_size, 0)]
            each = row_queries(batch, jnp.minimum(position + 1, jnp.maximum(room, 1)), shape.cut)
            each = each._replace(
                positions=position,
                write_index=jnp.where(is_kept, page * page_size + position % page_size, each.write_index),
                adapters=None if batch.adapters is None else batch.adapters.at[rows.last].get(mode="clip"),
            )
            x, pages = _computed(model, own_shape, weights, embed, x, norm, tokens, pages, each)
    return jnp.stack(drafts, axis=1), pages


def _computed(
    model: Model,
    shape: PackedShape,
    weights: Weights,
    embed: Weights,
    x: Float[Array, "T E"],
    norm: Float[Array, "E"],
    following: Int[Array, "T"],
    pages: Any,
    batch: Batch,
) -> tuple[Float[Array, "T E"], Any]:
    if batch.adapters is not None:
        (weights,) = for_rows((weights,), batch.adapters, shape.num_adapters)
    inputs = model.draft_inputs(weights, model.embed(embed, following, batch.positions), x, norm)
    attend = step_attention(shape, batch, [], model.config.num_kv_heads // num_devices())
    return model.layer(weights, inputs, batch.positions, pages, attend, kind=model.layer_kinds[-1])


class Assistant(NamedTuple):
    """A model that drafts for another one, with its weights; its config is `fitted` to that one."""

    model: Model
    params: Params

    def weights(self, served: Params) -> tuple[Any, ...]:
        """The weights that its executables read."""
        return self.params, served.embed, served.head["norm"]

    def pages(self, served: ServedModel, layers: Mapping[int, Any]) -> tuple[Any, ...]:
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
    run: Executables, assistant: Assistant, served: Model, params: Params, steps: DraftSteps, layers: Mapping[int, Any]
) -> None:
    """Add the executable `draft layer` of each step, which writes the drafts of every row.

    Args:
        params: of the served model, arrays or shapes with shardings.
        layers: the served model's pages or their shapes, by place.
    """
    for step, shape in steps.packed.items():
        pages = assistant.pages(served, layers)
        arguments = *assistant.weights(params), *steps.arguments(step, pages)
        drafts = partial(_assistant_drafts, assistant.model, served, shape, steps)
        run.add(("draft layer", step, True), over_devices(drafts, arguments), *arguments)


def _assistant_drafts(
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
