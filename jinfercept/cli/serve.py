"""`jinfercept serve`: a server for OpenAI's clients. Imports what it needs when it runs."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tyro import conf

from jinfercept.cli.options import Maybe, ModelName, Switch, engine_flags, group_flags, option_flags
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.serve.observe.log_lines import begin_logging
from jinfercept.serve.options import ServerOptions

log = logging.getLogger("jinfercept.serve")

_ENDING_S = 1.0
"""Seconds after the limit of a shutdown until the process is ended."""
USUAL = (
    "host",
    "port",
    "served_model_name",
    "api_key",
    "api_key_file",
    "allowed_hosts",
    "state_url",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "tools",
    "loras",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "speculative_config",
    "kv_tokens",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "swap_space",
    "kv_disk",
    "policy",
    "overload",
)
"""Options that `jinfercept serve --help` shows."""


@dataclass(frozen=True)
class UsualFlags:
    """The flags that `jinfercept serve --help` shows."""

    model: ModelName
    server: Annotated[Mapping[str, Any], group_flags("server", ServerOptions, *USUAL)]
    engine: Annotated[EngineOptions, option_flags(*USUAL)]
    help_all: Switch = False
    """show all flags and exit"""


@dataclass(frozen=True)
class Serve:
    model: ModelName
    server: Annotated[Mapping[str, Any], group_flags("server", ServerOptions)]
    engine: Annotated[EngineOptions, engine_flags()]
    replicas: Maybe[int] = None
    """replicas of the model on this machine, with Ray; see docs/fleet.md (default: this process serves alone, without Ray)"""
    notes: conf.Suppress[tuple[str, ...]] = ()

    def options(self) -> ServerOptions:
        """Build the server's options. Raises `ConfigError` if they contradict each other."""
        return ServerOptions(**{name: _unpacked(value) for name, value in self.server.items()})

    def run(self) -> int:
        """Serve until a signal ends the server; returns 0."""
        options = self.options()
        try:
            from jinfercept.serve.app import create_app
            from jinfercept.serve.process import end_process_by
            from jinfercept.serve.serve import listen, serve_app
            from jinfercept.serve.server_tools import open_server_tools
            from jinfercept.serve.service import Service
        except ImportError as error:
            raise ConfigError(
                "the server needs more packages", got=f"no package {error.name}", fix="pip install 'jinfercept[serve]'"
            ) from error
        begin_logging(options.log_format)
        for note in self.notes:
            log.warning(note)
        if self.replicas is not None:
            from jinfercept.fleet.ray_deploy import serve_fleet

            serve_fleet(self.model, self.engine, options, self.replicas)
            return 0
        from jinfercept.llm import LLM
        from jinfercept.start.progress import StartDisplay
        from jinfercept.start.several_hosts import is_follower

        if is_follower(self.engine):
            with StartDisplay() as progress:
                LLM(self.model, progress=progress, **self.engine)  # raises SystemExit when host 0 ends
        listener, url = listen(options)
        database = options.open_state()
        with (
            open_server_tools(options.tools) as tools,
            StartDisplay() as progress,
            LLM(self.model, progress=progress, **self.engine) as llm,
        ):
            service = Service(llm, self.model, options, tools, database)
            service.check_template()
            progress.close()
            serve_app(
                create_app(service),
                service,
                listener,
                lambda: print(f"jinfercept: {url}", flush=True),
                lambda: end_process_by((tools.ends_s or time.monotonic()) + _ENDING_S),
            )
        return 0


def _unpacked(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    try:
        # vLLM's users write a JSON list as the value of a flag that repeats
        return tuple(str(item) for text in value for item in (json.loads(text) if text.startswith("[") else [text]))
    except ValueError as error:
        raise ConfigError("the list is not JSON", got=" ".join(value), fix="repeat the flag instead") from error
