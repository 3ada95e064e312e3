"""What a start settles for layers with a window: whether they have a pool of pages of their own, and how large it is.

In a pool of their own a context has the pages of its window only, and is kept whole or not at all (`kv/windows.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError
from jinfercept.kv.windows import WindowSizes
from jinfercept.models.protocol import ServedModel, states_of, windows_of

LEAST_WINDOWS = 4
"""Layers with a window have a pool of their own if the longest sequence has so many times the tokens of the widest."""
MEAN_WINDOWS = 8
"""By default both pools hold as many contexts, if these have so many times the tokens of the widest window."""


class WindowPlan(NamedTuple):
    """Layers with a pool of their own.

    Attributes:
        num_layers: how many there are; 0: none.
        window: tokens that the widest window sees.
        slack: tokens behind it that a context keeps.
        num_tokens: of the pool; None: as `share` says.
        share: tokens of the pool for each of the other one.
        least_tokens: with which one sequence can be computed.
    """

    num_layers: int = 0
    window: int = 0
    slack: int = 0
    num_tokens: int | None = None
    share: float = 0.0
    least_tokens: int = 0

    def of(self, kv_tokens: int, page_size: int) -> int:
        """Tokens of the pool beside another one of so many, in whole pages."""
        if not self.num_layers:
            return 0
        num_tokens = max(self.least_tokens, self.num_tokens or int(self.share * kv_tokens))
        return -(-num_tokens // page_size) * page_size

    def sizes(self, num_tokens: int, host_tokens: int, page_size: int, cost: float) -> WindowSizes:
        """The pool's sizes.

        Args:
            num_tokens: see `of`.
            host_tokens: that the host tier holds of the other layers.
            cost: bytes of a token in the layers of the pool, over those in the others.
        """
        num_host_pages = int(self.share * host_tokens) // page_size
        return WindowSizes(self.window, num_tokens // page_size, num_host_pages, page_size * cost, self.slack)


NO_WINDOW_PLAN = WindowPlan()


def are_long(windows: Sequence[int], longest: int) -> bool:
    """Whether by default layers with these windows have a pool of their own, where the longest sequence has so many tokens."""
    return longest >= LEAST_WINDOWS * max(windows)


def plan_windows(model: ServedModel, config: EngineConfig, longest: int) -> WindowPlan:
    """Which layers have a pool of their own. Raises `ConfigError` if one is asked for that the model cannot have.

    Args:
        longest: tokens of the longest sequence.
    """
    page_size, num_tokens = config.cache.page_size, config.cache.num_window_tokens
    windows = [window for window in windows_of(model) if window is not None and window < longest]
    why_not = next(
        (
            reason
            for reason, holds in (
                ("no layers have a window that is shorter than the longest sequence", not windows),
                ("all layers have a window", len(windows) == model.config.num_layers),
                ("the model has recurrent layers", bool(states_of(model))),
                ("pages on a disk have all layers (kv_disk)", config.cache.kv_disk is not None),
            )
            if holds
        ),
        None,
    )
    if why_not is not None:
        if num_tokens:
            raise ConfigError(f"no pool for layers with a window: {why_not}", got=num_tokens, fix="num_window_tokens=0")
        return NO_WINDOW_PLAN
    widest = max(windows)
    if num_tokens == 0 or (num_tokens is None and not are_long(windows, longest)):
        return NO_WINDOW_PLAN
    slack = page_size + 1 + config.scheduling.speculation.num_speculative_tokens
    kept_tokens = widest + slack + 2 * page_size
    least = config.scheduling.max_num_batched_tokens + 2 * page_size + 2 * kept_tokens
    if num_tokens is not None and num_tokens < least:
        what = "the pool of layers with a window does not hold a step's tokens and two windows"
        raise ConfigError(what, got=f"num_window_tokens={num_tokens}", fix=f"at least {least}, or 0")
    share = min(1.0, kept_tokens / min(longest, MEAN_WINDOWS * widest))
    return WindowPlan(len(windows), widest, slack, num_tokens, share, least)
