"""The file of `jinfercept deploy`: what a fleet serves, and with how many replicas.

```yaml
name: assistants                 # of the application; default: jinfercept
model: smollm2-135m
version: "2"                     # a change of it, or of any other value, replaces the replicas one after the other
replicas: {min: 2, max: 8}       # or a number
cpus_per_replica: 4              # that Ray's scheduler counts; default: 0
engine: {kv_tokens: 65536, tensor_parallel_size: 2}
server: {host: 0.0.0.0, port: 8000, served_model_name: [assistant]}
```
"""

import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, get_origin, get_type_hints

import yaml

from jinfercept.config import EngineConfig, EngineOptions, check_type
from jinfercept.errors import ConfigError, nearest
from jinfercept.serve.options import ServerOptions

MOST_REPLICAS = 10_000
_NAMES = ("name", "model", "version", "replicas", "cpus_per_replica", "engine", "server")


class ReplicaRange(NamedTuple):
    """Replicas of a fleet: a fixed number if both are equal."""

    least: int
    most: int


_ONE = ReplicaRange(1, 1)


@dataclass(frozen=True)
class FleetConfig:
    """The model and the options of a fleet.

    Attributes:
        model: as on the command line.
        version: of the weights, or of whatever shall replace the replicas.
        cpus_per_replica: that Ray's scheduler counts for each.
    """

    model: str
    name: str = "jinfercept"
    version: str = ""
    replicas: ReplicaRange = _ONE
    cpus_per_replica: float = 0.0
    engine: EngineOptions = field(default_factory=dict)  # pyright: ignore[reportAssignmentType] # no key is required
    server: ServerOptions = field(default_factory=ServerOptions)

    @property
    def fingerprint(self) -> str:
        """A digest of everything here; the replicas of another one are replaced."""
        seen = [*map(str, (self.model, self.version, self.replicas, self.cpus_per_replica)), dict(self.engine)]
        seen += [asdict(self.server), sorted(self.server.key_rules())]
        return hashlib.sha256(json.dumps(seen, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def secret(self) -> bytes:
        """Secret of the fleet's conversation keys: the same for every process that reads the same file."""
        return hashlib.sha256(f"{self.name}/{sorted(self.server.key_rules())}".encode()).digest()

    def check_files(self) -> None:
        """Raise `ConfigError` for a URL of a database that cannot be used, and for files of tools that cannot be read here.

        Connects to no database and runs no tools; nodes of a cluster may have other files.
        """
        if (url := self.server.database_url()) is not None:
            from jinfercept.serve.state.database import parse_url

            parse_url(url)
        for path in self.server.tools:
            if not os.access(path, os.R_OK):
                raise ConfigError(
                    "a file of tools cannot be read", got=path, fix="give a file that ends in .py or .toml"
                )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The contents of a YAML file. Raises `ConfigError` if it cannot be used."""
        try:
            return cls.parse(yaml.safe_load(Path(path).read_bytes()))
        except OSError as error:
            raise ConfigError("the fleet's file cannot be read", got=error, fix="give a YAML file") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(
                "the fleet's file is not YAML", got=" ".join(str(error).split()), fix="correct it"
            ) from error

    @classmethod
    def parse(cls, data: Any) -> Self:
        """The contents of a file, strictly checked. Raises `ConfigError`."""
        values = _table(data, "the fleet's file", _NAMES)
        model = values.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError("model must name a model", got=model, fix="model: NAME or a directory")
        name = values.get("name", "jinfercept")
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
            raise ConfigError("name must be 1 to 64 letters, digits, - and _", got=name, fix="name: assistants")
        cpus = values.get("cpus_per_replica", 0.0)
        if not isinstance(cpus, int | float) or isinstance(cpus, bool) or not 0 <= cpus <= 4096:
            raise ConfigError("cpus_per_replica must be a number of CPUs", got=cpus, fix="0 or more")
        engine = dict(_table(values.get("engine", {}), "engine", None))
        EngineConfig.from_options(engine)  # pyright: ignore[reportArgumentType] # it checks the names
        return cls(
            model,
            name,
            "" if values.get("version") is None else str(values["version"]),
            _range(values.get("replicas", 1)),
            float(cpus),
            engine,  # pyright: ignore[reportArgumentType]
            _server(values.get("server", {})),
        )


def _server(data: Any) -> ServerOptions:
    """The server's options, their types checked. A text is no list of one: its letters would be API keys."""
    hints = get_type_hints(ServerOptions)
    values = dict(_table(data, "server", tuple(hints)))
    for name, value in values.items():
        if get_origin(hints[name]) is not tuple:
            check_type(name, value, hints[name])
        elif isinstance(value, list) and all(isinstance(text, str) for text in value):
            values[name] = tuple(value)
        else:
            shown = "a text" if isinstance(value, str) else type(value).__name__  # it may be a secret
            raise ConfigError(f"{name} has the wrong type", got=shown, fix=f"a list of texts: {name}: [ONE, OTHER]")
    if values.get("uds") is not None:
        raise ConfigError("a deployed fleet cannot use a Unix socket", got=values["uds"], fix="give host and port")
    options = ServerOptions(**values)
    check_server(options)
    return options


def check_server(options: ServerOptions) -> None:
    """Raise `ConfigError` for an option that a fleet does not have: a task of MCP is known to one replica only."""
    if options.mcp:
        raise ConfigError("a fleet is no MCP server", got="mcp", fix="leave it out, or serve without replicas")


def _table(data: Any, what: str, names: tuple[str, ...] | None) -> Mapping[str, Any]:
    """A mapping with known names only."""
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigError(
            f"{what} must be a table of names and values", got=reprlib.repr(data)[:80], fix="see docs/fleet.md"
        )
    for name in data:
        if names is not None and name not in names:
            raise ConfigError(f"{what} has no {name}{nearest(name, names)}", got=name, fix=f"one of {', '.join(names)}")
    return data


def _range(value: Any) -> ReplicaRange:
    """`4`, or `{min: 1, max: 8}`."""
    if isinstance(value, dict):
        table = _table(value, "replicas", ("min", "max"))
        replicas = ReplicaRange(table.get("min", 1), table.get("max", 1))
    else:
        replicas = ReplicaRange(value, value)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in replicas) or not (
        1 <= replicas.least <= replicas.most <= MOST_REPLICAS
    ):
        raise ConfigError("replicas must be a number, or {min: …, max: …}", got=value, fix=f"1 to {MOST_REPLICAS}")
    return replicas
