"""The static sizes of a runner: what its executables and its pages are made for."""

from dataclasses import dataclass

from jinfercept.models.protocol import ServedModel, kv_places, states_of, windowed_config, windows_of
from jinfercept.runner.packing import PackedShape


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """The static sizes of a runner."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    buckets: tuple[int, ...]  # query tokens of the executables, ascending
    layers_per_step: int  # of one executable
    staging_pages: int = 1  # most pages of one host array, a power of two; 1: every page is its own
    pinned_memory: bool = True  # whether host arrays are page-locked
    moved_pages: int = 1 << 30  # pages for which the device has memory beside the pool while they are on their way
    kv_cache_dtype: str = "auto"  # format of the pages: `auto`, the type of the weights; `int8`; `fp8`
    num_drafts: int = 0  # most drafts of a sequence in a step
    is_assisted: bool = False  # an assistant makes them, see `draft_layer.py`
    num_adapters: int = 0  # that the weights have room for
    # Vocabulary size of the model for which this one drafts; 0: it serves itself. The logits of a drafting model are cut to
    # that size, or filled with -inf; its rows have no options but temperature and random key.
    drafts_for: int = 0
    num_states: int = 0  # slots of recurrent layers' states; 0: the model has none
    routed_experts: int = 0  # experts of a token in each layer that has some, if steps return them; 0: they do not
    # Pages of the pool of layers whose window is smaller than the longest sequence; 0: these share the pool of the others.
    # Never with `num_states`; needs layers of both sorts.
    num_window_pages: int = 0
    fewest_rows: int = 1  # least rows of logits that an executable computes
    num_drawn: int | None = None  # only so many first tokens are drawn, since the others have no text; None: all

    def bucket(self, num_tokens: int) -> PackedShape:
        rows = min(num_tokens, self.max_num_seqs)
        return PackedShape(
            num_tokens,
            rows,
            self.most_tokens // self.page_size,
            has_states=self.num_states > 0,
            routed_experts=self.routed_experts,
            num_adapters=self.num_adapters,
        )

    @property
    def most_tokens(self) -> int:
        """Tokens that a sequence's page table has room for."""
        return -(-self.max_model_len // self.page_size) * self.page_size

    def groups(self, num_layers: int) -> list[tuple[int, int]]:
        """First and end layer of every group, the layers of one executable."""
        step = self.layers_per_step
        return [(first, min(first + step, num_layers)) for first in range(0, num_layers, step)]

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """The buckets in which a step may have decode rows only, ascending."""
        smaller = (0, *self.buckets)
        return tuple(size for size, before in zip(self.buckets, smaller, strict=False) if before < self.max_num_seqs)

    @property
    def sample_rows(self) -> tuple[int, ...]:
        """Numbers of sampled rows that have executables, ascending."""
        most = max(self.fewest_rows, self.max_num_seqs * (1 + self.num_drafts))
        return tuple(sorted({min(size, most) for size in self.buckets}))


def pool_windows(model: ServedModel, shape: RunnerShape) -> tuple[int, ...]:
    """By layer, the window of those with pages in the pool for windows, 0 for the others; () if there is no such pool."""
    if not shape.num_window_pages:
        return ()
    # pages behind a window are given back while the sequence goes on, so this pool is smaller than the other
    own_sizes = windowed_config(model) is not model.config
    windows = tuple(
        window if window and (own_sizes or window < shape.most_tokens) else 0 for window in windows_of(model)
    )
    assert any(windows), "a pool for windows, and no layer has one that is smaller than the longest sequence"
    assert not all(windows), "the pool of layers without a window has no layers"
    assert not shape.num_states
    return windows


def in_second_pool(model: ServedModel, shape: RunnerShape) -> tuple[bool, ...]:
    """By layer with pages or states of its own: whether it has states, or pages in the pool for windows, rather than pages in
    the first pool."""
    by_layer = pool_windows(model, shape) or states_of(model) or (0,) * model.config.num_layers
    by_place = dict(zip(kv_places(model), by_layer, strict=True))
    return tuple(bool(by_place[place]) for place in range(len(by_place)))
