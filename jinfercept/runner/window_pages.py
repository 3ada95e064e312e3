"""Which layers have pages in the pool for windows, see `RunnerShape.num_window_pages`, and these between those of the others.

Their pages behind the window are given back while the sequence goes on, so that this pool is smaller than the other.
"""

from collections.abc import Sequence
from typing import Any

from jinfercept.models.protocol import ServedModel, windows_of
from jinfercept.runner.shape import RunnerShape


def pool_windows(model: ServedModel, shape: RunnerShape) -> tuple[int, ...]:
    """By layer, the window of those whose pages are in the pool for windows, 0 for the others; () if there is no such pool."""
    if not shape.num_window_pages:
        return ()
    windows = tuple(window if window and window < shape.most_tokens else 0 for window in windows_of(model))
    assert any(windows), "a pool for windows, and no layer has one that is smaller than the longest sequence"
    assert not all(windows), "the pool of layers without a window has no layers"
    assert shape.transfer_parts == 1
    assert not shape.num_states
    return windows


def with_windows(pages: Sequence[Any], window_pages: Sequence[Any], windows: tuple[int, ...]) -> tuple[Any, ...]:
    """The pages of every layer, from those of the two pools.

    Args:
        windows: see `pool_windows`.
    """
    if not windows:
        return tuple(pages)
    full, windowed = iter(pages), iter(window_pages)
    return tuple(next(windowed if window else full) for window in windows)


def by_pool(layers: Sequence[Any], windows: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The pages of the layers of each pool, that for windows second."""
    of_layers = list(zip(layers, windows or (0,) * len(layers), strict=True))
    return tuple(pages for pages, window in of_layers if not window), tuple(
        pages for pages, window in of_layers if window
    )
