"""`jinfercept serve`: its flags, and what it does. Imports what it needs when it runs."""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from jinfercept.cli.flags import MODEL_HELP, add_fields
from jinfercept.cli.vllm_flags import add_unneeded
from jinfercept.config import section_fields
from jinfercept.errors import ConfigError
from jinfercept.server.log_lines import begin_logging
from jinfercept.server.options import ServerOptions

log = logging.getLogger("jinfercept.server")


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """The flags that are not the engine's."""
    serve.add_argument("model", help=MODEL_HELP)
    add_fields(serve.add_argument_group("server"), section_fields(ServerOptions))
    add_unneeded(serve)


def serve(model: str, unneeded: Sequence[str] = (), **flags: Any) -> int:
    """Serve a model until a signal ends it.

    Args:
        unneeded: what the log is to say of flags for which there is nothing to do.
        flags: the server's and the engine's.
    """
    given: dict[str, Any] = {
        field.name: flags.pop(field.name) for field in fields(ServerOptions) if field.name in flags
    }
    given |= {name: _several(value) for name, value in given.items() if isinstance(value, list)}
    options = ServerOptions(**given)
    try:
        from jinfercept.server.serve import listen
        from jinfercept.server.serve import serve as serve_until_signal
        from jinfercept.server.server_tools import open_server_tools
        from jinfercept.server.service import Service
    except ImportError as error:
        raise ConfigError(
            "the server needs more packages", got=f"no package {error.name}", fix="pip install 'jinfercept[serve]'"
        ) from error
    from jinfercept.llm import LLM
    from jinfercept.startup.progress import StartDisplay

    begin_logging(options.log_format)
    for told in unneeded:
        log.warning(told)
    listener, url = listen(options)
    with (
        open_server_tools(options.tools) as tools,
        StartDisplay() as progress,
        LLM(model, progress=progress, **flags) as llm,
    ):
        service = Service(llm, model, options, tools)
        service.check_template()
        progress.close()
        serve_until_signal(service, listener, lambda: print(f"jinfercept: {url}", flush=True))
    return 0


def _several(values: list[str]) -> tuple[str, ...]:
    """What a flag that repeats was given; a JSON list is taken apart, since vLLM's users write those."""
    try:
        return tuple(str(one) for value in values for one in (json.loads(value) if value.startswith("[") else [value]))
    except ValueError as error:
        raise ConfigError("a list is not JSON", got=" ".join(values), fix="repeat the flag instead") from error
