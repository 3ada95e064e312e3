"""Sizes that a start settles for recurrent layers, which have states, and for layers with a window.

In a pool of their own, layers with a window have the pages of a context's window only. A context is then kept whole or not at
all (`kv/windows.py`).
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Self

from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError, refuse_any
from jinfercept.kv.side_pool import SideSizes
from jinfercept.models.delta_rule import BLOCK_TOKENS
from jinfercept.models.protocol import (
    ModelDimensions,
    ServedModel,
    kv_places,
    num_kv_layers,
    states_of,
    windowed_config,
    windows_of,
)
from jinfercept.runner.page_transfers import slot_bytes

log = logging.getLogger("jinfercept")

GIB = 1 << 30
STATES_SHARE = 4
"""States of contexts that do not run take one in so many bytes of the free memory at most, unless the user says more."""
STATES_PER_SEQUENCE = 4
"""States for each sequence that may run, if they fit: contexts pause, and prefixes have states, too."""
MEAN_STATES = 8
"""Mean bytes of a context's pages over those of its state, with which the host tier holds as many of both."""


class StatePlan(NamedTuple):
    """States of recurrent layers."""

    num_states: int = 0  # sequences that can have one; 0: the model has no such layers
    slot_bytes: int = 0  # of one sequence's states, on each device
    num_host_states: int = 0  # sequences whose states have a copy on the host

    @property
    def num_bytes(self) -> int:
        """Bytes of all states on each device, with the one that is no sequence's."""
        return (self.num_states + 1) * self.slot_bytes if self.num_states else 0

    def with_host(self, host_bytes: int, page_bytes: int, num_devices: int) -> Self:
        """The plan with copies in a host tier of `host_bytes`, or without any if that does not hold a state and a page.

        Bytes of a page and devices are those of this host.
        """
        state_bytes = num_devices * self.slot_bytes
        if not state_bytes:
            return self
        of_pages = page_bytes * -(-MEAN_STATES * state_bytes // page_bytes)
        num_contexts = host_bytes // (of_pages + state_bytes) or int(host_bytes >= page_bytes + state_bytes)
        return self._replace(num_host_states=num_contexts)


NO_STATES = StatePlan()


def check_recurrent(config: EngineConfig, model: ServedModel, draft: ServedModel | None = None) -> None:
    """Raise `ConfigError` for options with which a model with recurrent layers, or one without, is not served."""
    if draft is not None and windowed_config(draft) is not draft.config:
        raise ConfigError(
            "a draft model has heads of one size, since it has no pool for layers with a window",
            got=draft.config.family,
            fix="take one of another family",
        )
    if draft is not None and states_of(draft):
        raise ConfigError(
            "a draft model must not have recurrent layers",
            got=draft.config.family,
            fix="take one with attention in all layers",
        )
    if not states_of(model):
        if config.cache.num_states is not None:
            raise ConfigError(
                "the model has no recurrent layers",
                got=f"num_states={config.cache.num_states}",
                fix="leave num_states out",
            )
        return
    most, num_drafts = (BLOCK_TOKENS - 1) // 2, config.scheduling.speculation.num_speculative_tokens
    refuse_any(
        "models with recurrent layers cannot be served with this option",
        (num_drafts > most, f"{num_drafts} draft tokens", f"num_speculative_tokens of {most} at most"),
    )
    log.info("recurrent layers: contexts are kept whole, or computed again from a state behind their first tokens on")


def plan_states(model: ServedModel, dtype: str, num_devices: int, config: EngineConfig, free_bytes: int) -> StatePlan:
    """How many sequences can have states, in `free_bytes` on each device beside the weights.

    Raises:
        ConfigError: they are fewer than may run at once.
    """
    states = states_of(model)
    if not states:
        return NO_STATES
    each, most_running = slot_bytes(states, dtype, num_devices), config.scheduling.max_num_seqs
    num_states = config.cache.num_states
    if num_states is None:
        num_states = max(most_running, min(STATES_PER_SEQUENCE * most_running, free_bytes // STATES_SHARE // each))
    plan = StatePlan(num_states, each)
    if num_states < most_running:
        raise ConfigError(
            "num_states must be at least max_num_seqs: every running sequence has a state",
            got=f"num_states={num_states}",
            fix=f"at least max_num_seqs={most_running}",
        )
    if plan.num_bytes > free_bytes:
        raise ConfigError(
            "the states of recurrent layers do not fit",
            got=f"{num_states} of {each / GIB:.3f} GiB, {free_bytes / GIB:.2f} GiB free",
            fix="lower max_num_seqs or num_states, or use a smaller model",
        )
    return plan


LEAST_WINDOWS = 4
"""Length of the longest sequence over that of the widest window, from which on windows have a pool of their own."""
MEAN_WINDOWS = 8
"""Mean length of contexts over that of the widest window, with which both pools hold as many contexts by default."""


class WindowPlan(NamedTuple):
    """Layers with a pool of their own."""

    num_layers: int = 0
    window: int = 0  # tokens that the widest window sees
    slack: int = 0  # tokens behind it that a context keeps
    num_tokens: int | None = None  # of the pool; None: as `share` says
    share: float = 0.0  # tokens of the pool for each token of the other pool
    least_tokens: int = 0  # with which one sequence can be computed
    sizes_config: ModelDimensions | None = None  # sizes of these layers; None: as of the others

    def of(self, kv_tokens: int, page_size: int) -> int:
        """Tokens of the pool, in whole pages, beside a pool of `kv_tokens` for the other layers."""
        if not self.num_layers:
            return 0
        num_tokens = max(self.least_tokens, self.num_tokens or int(self.share * kv_tokens))
        return -(-num_tokens // page_size) * page_size

    def sizes(self, num_tokens: int, page_size: int, cost: float) -> SideSizes:
        """The pool's sizes, without copies on the host.

        Args:
            cost: bytes of a token in the layers of the pool, over those in the others.
        """
        return SideSizes(num_tokens // page_size, 0, page_size * cost, self.window, self.slack)


NO_WINDOW_PLAN = WindowPlan()


def are_long(windows: Sequence[int], longest: int) -> bool:
    """Whether layers with these windows have a pool of their own by default, for sequences of up to `longest` tokens."""
    return longest >= LEAST_WINDOWS * max(windows)


def plan_windows(model: ServedModel, config: EngineConfig, longest: int) -> WindowPlan:
    """Which layers have a pool of their own, for sequences of up to `longest` tokens.

    Raises:
        ConfigError: a pool is asked for that the model cannot have.
    """
    page_size, num_tokens = config.cache.page_size, config.cache.num_window_tokens
    of_layers, sizes_config = windows_of(model)[: len(set(kv_places(model)))], windowed_config(model)
    windows = [window for window in of_layers if window is not None and window < longest]
    if sizes_config is model.config:
        sizes_config = None
    else:
        windows = [min(window, longest) for window in of_layers if window is not None]
        refuse_any(
            "layers with a window have heads of other sizes than the others, and so a pool of their own",
            (num_tokens == 0, "num_window_tokens=0", "leave it out"),
        )
    for why_not, holds in (
        ("no layers have a window that is shorter than the longest sequence", not windows),
        ("all layers have a window", len(windows) == num_kv_layers(model.config)),
        ("the model has recurrent layers", bool(states_of(model))),
    ):
        if holds:
            problem = f"no pool for layers with a window: {why_not}"
            refuse_any(problem, (num_tokens, num_tokens, "num_window_tokens=0"))
            return NO_WINDOW_PLAN
    widest = max(windows)
    if num_tokens == 0 or (num_tokens is None and sizes_config is None and not are_long(windows, longest)):
        return NO_WINDOW_PLAN
    slack = page_size + 1 + config.scheduling.speculation.num_speculative_tokens
    kept_tokens = widest + slack + 2 * page_size
    least = config.scheduling.max_num_batched_tokens + 2 * page_size + 2 * kept_tokens
    if num_tokens is not None and num_tokens < least:
        what = "the pool of layers with a window does not hold a step's tokens and two windows"
        raise ConfigError(what, got=f"num_window_tokens={num_tokens}", fix=f"at least {least}, or 0")
    share = min(1.0, kept_tokens / min(longest, MEAN_WINDOWS * widest))
    return WindowPlan(len(windows), widest, slack, num_tokens, share, least, sizes_config)
