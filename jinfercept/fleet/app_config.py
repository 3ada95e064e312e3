"""The arguments of the application that Ray Serve's own tools deploy: what a fleet serves, and with how many replicas.

```yaml
model: smollm2-135m
replicas: {min: 2, max: 8}       # or a number
cpus_per_replica: 4              # that Ray's scheduler counts; default: 0
engine: {kv_tokens: 65536, tensor_parallel_size: 2}
server: {served_model_name: [assistant]}
```
"""

import hashlib
from math import ceil
from typing import Annotated, Any, Self, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from jinfercept.config import EngineConfig, check_type
from jinfercept.errors import ConfigError, nearest
from jinfercept.serve.options import ServerOptions

_Number = Annotated[int, Field(ge=1, le=10_000)]


def _range(value: Any) -> Any:
    return value if isinstance(value, dict) else {"min": value, "max": value}


class ReplicaRange(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    min: _Number = 1
    max: _Number = 1

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.min > self.max:
            raise ValueError("min is larger than max")
        return self


def _engine(options: Any) -> Any:
    EngineConfig.from_options(options)
    return options


def _server(data: Any) -> ServerOptions:
    """The server's options, their types checked. A text is no list of one: its letters would be API keys."""
    hints, values = get_type_hints(ServerOptions), dict(data)
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(f"server has no {name}{nearest(name, list(hints))}", got=name, fix="see --help-all")
        if get_origin(hints[name]) is not tuple:
            check_type(name, value, hints[name])
        elif isinstance(value, list) and all(isinstance(text, str) for text in value):
            values[name] = tuple(value)
        else:  # it may be a secret
            raise ConfigError(f"{name} has the wrong type", got=type(value).__name__, fix="give a list of texts")
    options = ServerOptions(**values)
    check_server(options)
    return options


class FleetConfig(BaseModel):
    """The model and the options of a fleet. `cpus_per_replica` are what Ray's scheduler counts for each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: Annotated[str, Field(min_length=1)]
    replicas: Annotated[ReplicaRange, BeforeValidator(_range)] = ReplicaRange()
    cpus_per_replica: Annotated[float, Field(ge=0, le=4096)] = 0.0
    engine: Annotated[Any, PlainValidator(_engine)] = Field(default_factory=dict)
    server: Annotated[ServerOptions, PlainValidator(_server)] = Field(default_factory=ServerOptions)

    @property
    def secret(self) -> bytes:
        """Secret of the fleet's conversation keys: the same for every process that has the same arguments."""
        return hashlib.sha256(f"{self.model}/{sorted(self.server.key_rules())}".encode()).digest()

    @classmethod
    def parse(cls, data: Any) -> Self:
        """The arguments, strictly checked. Raises `ConfigError`."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            field = ".".join(map(str, problem["loc"]))
            got = f"{field}: {problem['msg']}" if field else problem["msg"]
            raise ConfigError("the arguments of the fleet are wrong", got=got, fix="see docs/fleet.md") from None


def check_server(options: ServerOptions) -> None:
    """Raise `ConfigError` for an option that a fleet does not have: a task of MCP is known to one replica only."""
    if options.mcp:
        raise ConfigError("a fleet is no MCP server", got="mcp", fix="leave it out, or serve without replicas")


TARGET_DEMAND = 0.8
"""Share of the device's KV pool that is demanded on average when the number of replicas is right."""


def replicas_by_memory(context: Any) -> tuple[int, dict[str, Any]]:
    """The number of replicas for Ray Serve: demanded memory · time over that of one replica's pool, at `TARGET_DEMAND`.

    `context` is a `ray.serve.config.AutoscalingContext`, with the mean `memory_demand` of each replica.
    """
    demands = (context.aggregated_metrics or {}).get("memory_demand", {})
    if len(demands) < context.current_num_replicas or not demands:
        return context.target_num_replicas, {}
    return max(1, ceil(sum(demands.values()) / TARGET_DEMAND - 1e-9)), {}
