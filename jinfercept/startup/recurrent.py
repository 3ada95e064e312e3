"""What a start settles for a model with recurrent layers: how many states there are, and which options it is served without.

A state is of all tokens of a context up to one place, so that no draft is taken back. Pages on a disk would lack the states.
"""

import logging
from typing import NamedTuple, Self

from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError
from jinfercept.models.protocol import ServedModel, states_of
from jinfercept.runner.page_shapes import slot_bytes

log = logging.getLogger("jinfercept")

GIB = 1 << 30
STATES_SHARE = 4
"""One in so many bytes of the free memory goes to states of contexts that do not run at most, unless the user says more."""
STATES_PER_SEQUENCE = 4
"""States for each sequence that may run, if they fit: contexts pause, and prefixes have states, too."""
MEAN_STATES = 8
"""The host tier holds as many contexts' pages as it holds states, if a context's pages take so many times a state's bytes."""


class StatePlan(NamedTuple):
    """States of recurrent layers.

    Attributes:
        num_states: sequences that can have one; 0: the model has no such layers.
        slot_bytes: of one sequence's, on each device.
        num_host_states: sequences whose states have a copy on the host.
    """

    num_states: int = 0
    slot_bytes: int = 0
    num_host_states: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all states on each device, with the one that is no sequence's."""
        return (self.num_states + 1) * self.slot_bytes if self.num_states else 0

    def with_host(self, host_bytes: int, page_bytes: int, num_devices: int) -> Self:
        """The same with copies in a host tier of so many bytes; there are none if it does not hold a state and a page.

        Args:
            page_bytes: of a page's copy on this host.
            num_devices: of this host.
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
    if not states_of(model):
        if draft is not None and states_of(draft):
            raise ConfigError(
                "a draft model must not have recurrent layers",
                got=draft.config.family,
                fix="take one with attention in all layers",
            )
        if config.cache.num_states is not None:
            raise ConfigError(
                "the model has no recurrent layers",
                got=f"num_states={config.cache.num_states}",
                fix="leave num_states out",
            )
        return
    speculation = config.scheduling.speculation
    for is_asked, got, fix in (
        (draft is not None or speculation.num_speculative_tokens > 0, "speculative_config", "no drafts"),
        (config.cache.kv_disk is not None, "kv_disk", "no disk tier"),
    ):
        if is_asked:
            raise ConfigError("models with recurrent layers cannot be served with this option", got=got, fix=fix)
    log.info("recurrent layers: contexts are kept whole, or computed again from a state behind their first tokens on")


def plan_states(model: ServedModel, dtype: str, num_devices: int, config: EngineConfig, free_bytes: int) -> StatePlan:
    """How many sequences can have states. Raises `ConfigError` if that is less than may run at once.

    Args:
        dtype: of the weights.
        free_bytes: on each device, beside the weights.
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
