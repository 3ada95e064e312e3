"""The adapters of an engine: read beside its model at the start, and loaded and unloaded while it serves."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, final

from jinfercept.config import AdapterOptions, EngineConfig
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.errors import ConfigError
from jinfercept.models import embedded
from jinfercept.models.adapters import AdapterRoom, AdapterWeights, room_for, with_adapter, with_room
from jinfercept.models.load import Loaded
from jinfercept.models.model import Model
from jinfercept.models.named_weights import WeightTree
from jinfercept.models.peft_adapter import adapter_in_memory, read_adapter
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.request import Adapter

TOOLS = "tools"
"""Name of the adapter with which the embedded model calls tools."""
log = logging.getLogger("jinfercept")


@final
class ServedAdapters:
    """The adapters of one model, in the room that its weights have for them."""

    def __init__(self, model: Model, room: AdapterRoom) -> None:
        self._model, self._room = model, room
        self.table = AdapterTable(room.slots)
        self.lock = threading.Lock()  # held while weights are replaced

    def read(self, directory: str | Path) -> AdapterWeights:
        """Read an adapter that fits the room. Raises `ModelError`, or `ConfigError` if its modules have no room."""
        return self._fitting(read_adapter(directory, self._model.checkpoint_config, self._room.rank))

    def in_memory(self, matrices: WeightTree, scale: float, names: Mapping[str, str] | None) -> AdapterWeights:
        """Make an adapter of arrays that fits the room. Arguments as of `adapter_in_memory`; errors as of `read`."""
        return self._fitting(adapter_in_memory(self._model.checkpoint_config, matrices, scale, names, self._room.rank))

    def _fitting(self, adapter: AdapterWeights) -> AdapterWeights:
        if extra := sorted(adapter.weights - self._room.weights):
            raise ConfigError(
                "the adapter changes modules for which there is no room",
                got=f"{', '.join(extra)}; there is room for {self._room}",
                fix="start with max_loras, which makes room for all",
            )
        return adapter

    def written(self, params: Params, slot: int, adapter: AdapterWeights) -> Params:
        """The weights with an adapter in a slot, from 1 on."""
        return with_adapter(self._model, params, slot, self._room.rank, adapter)


def with_tool_adapter(model: object, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a start, with the adapter of the embedded model for chats with tools.

    They stay as they are for other models, with an option of adapters, and with `tool_lora=""`, which is a start without it.

    Raises:
        ModelError: the adapter is not whole.
    """
    names = {field.name for field in fields(AdapterOptions)} - {"tool_call_bias"}
    adapter_options = {name for name in names if flags.get(name) is not None}
    if flags.get("tool_lora") == "":
        return {name: value for name, value in flags.items() if name != "tool_lora"}
    if str(model) != embedded.NAME or adapter_options or flags.get("load_format") == "dummy":
        return dict(flags)
    bias = flags.get("tool_call_bias")
    own = {"loras": {TOOLS: str(embedded.tool_adapter())}, "tool_lora": TOOLS}
    return {**flags, **own, "tool_call_bias": embedded.TOOL_CALL_BIAS if bias is None else bias}


def add_adapters(
    loaded: Loaded[ServedModel], config: EngineConfig
) -> tuple[Loaded[ServedModel], ServedAdapters | None]:
    """The model with room for the adapters of the options, and with these; unchanged if there are none.

    Raises:
        ConfigError: there is no room for adapters in models of one's own.
        ModelError: one of them cannot be read, or does not fit the model.
    """
    options = config.adapters
    if not options.num_slots:
        return loaded, None
    if not isinstance(model := loaded.model, Model):
        raise ConfigError(
            "a model of your own cannot have adapters", got=type(model).__name__, fix="merge them into its weights"
        )
    weights_by_name = {
        name: read_adapter(place, model.checkpoint_config, options.max_lora_rank)
        for name, place in options.directories.items()
    }
    room = room_for(weights_by_name.values(), options.max_loras, options.max_lora_rank)
    adapters = ServedAdapters(model, room)
    params = with_room(model, loaded.params, room)
    for name, weights in weights_by_name.items():
        with adapters.table.new_slot(name) as slot:
            params = adapters.written(params, slot, weights)
            adapters.table.put(Adapter(name, slot, weights.digest, options.directories[name]))
    if not weights_by_name:
        params = with_adapter(model, params, 1, room.rank, None)  # compiles what writes adapters
    log.info("adapters: %s; room for %s", ", ".join(weights_by_name) or "none yet", room)
    return replace(loaded, params=params), adapters
