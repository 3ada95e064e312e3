"""The tables of a TOML file of tools: the kinds of `[[tool]]` and their keys. Reading them starts nothing.

Unknown keys are errors. `${NAME}` in headers and in a server's environment stands for an environment variable.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jinfercept.calls import CallMode
from jinfercept.errors import ConfigError, nearest

_VARIABLE = re.compile(r"\$\{(\w+)\}")

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Limits(BaseModel):
    """The keys that all kinds of tools have. Functions of a Python file have the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    timeout_s: float = Field(default=60.0, gt=0, le=86400 * 7)  # for a call, including its time in the queue
    # calls that run at once, of an MCP server those of all its tools; more calls wait in a queue
    # None: any number; for a sync Python function `python_process.MAX_THREADS`
    max_concurrency: int | None = Field(default=None, ge=1)
    # longer results are cut, and end in a note
    max_result_tokens: int = Field(default=1024, ge=1)
    max_result_bytes: int | None = Field(default=None, ge=64)
    # when a call runs in a request with asynchronous calls; None: as the request says
    calls: CallMode | None = None
    # message of a timeout, before its seconds
    late: ClassVar[str] = "it took longer than"


class _Described(Limits):
    name: Name
    description: str = Field(min_length=1)
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments, of the type object


class PythonTable(Limits):
    """A Python function."""

    kind: Literal["python"]
    # `module:function` or `path/to/file.py:function`, relative to the folder of the TOML file
    function: str = Field(pattern=r"^[^:]+(:[^:]+)*:\w+$")
    # these replace name, description and parameters of the signature and the docstring
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class HttpTable(_Described):
    """An HTTP endpoint."""

    kind: Literal["http"]
    method: Literal["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    # may contain `{argument}`s, which are escaped; without `parameters` these are the tool's arguments, all strings
    url: str
    headers: dict[str, str] = {}
    # sent as JSON; a text `"{argument}"` in it becomes the argument
    # None: all arguments that are not in the URL; for a method without a body they are the query
    body: dict[str, Any] | None = None
    # after failed connections and statuses 502, 503 and 504, for idempotent methods
    retries: int = Field(2, ge=0, le=10)
    max_bytes: int = Field(1 << 20, ge=1)  # a longer response is an error
    # `host` or `*.domain`, with the scheme's default port and the one that the URL names, or `host:port` or `*.domain:port`
    # None: host and port of the URL; only a host named here may be at a private address
    allow_hosts: list[str] | None = None
    # JSON pointer (RFC 6901) to the result in a JSON response
    pointer: str | None = Field(None, pattern=r"^(/.*)?$")


class McpTable(Limits):
    """An MCP server with its tools."""

    kind: Literal["mcp"]
    name: Name
    # a server that is started here and uses standard input and output
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    # a server that uses streamable HTTP
    url: str | None = Field(None, pattern=r"^https?://")
    headers: dict[str, str] = {}
    prefix: str = Field("", pattern=r"^[a-zA-Z0-9_-]{0,32}$")
    # names of its tools, without the prefix
    include: list[str] | None = None
    exclude: list[str] = []
    # until it must have listed its tools
    connect_timeout_s: float = Field(30.0, gt=0)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has a command or a url")
        if self.headers if self.url is None else (self.args or self.env or self.cwd):
            raise ValueError("args, env and cwd belong to a command, headers belong to a url")
        return self


class ModelTable(_Described):
    """Another model, which answers one question per call."""

    kind: Literal["model"]
    # an OpenAI-compatible server, its model, and the environment variable of its key
    base_url: str | None = Field(None, pattern=r"^https?://")
    model: str | None = None
    api_key_env: str | None = None
    # a model in this process, with options as for `LLM`
    path: str | None = None
    options: dict[str, Any] = {}
    system: str | None = None
    max_tokens: int = Field(512, ge=1)
    temperature: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.base_url is None) == (self.path is None):
            raise ValueError("a model is at a base_url or at a path")
        if self.path is not None and (self.model or self.api_key_env):
            raise ValueError("model and api_key_env belong to a base_url")
        if self.path is None and (self.model is None or self.options):
            raise ValueError("a base_url needs the name of a model, and takes no options")
        return self


class PersonTable(_Described):
    """A person, who answers calls in an inbox."""

    kind: Literal["person"]
    timeout_s: float = Field(600.0, gt=0, le=86400 * 7)
    late: ClassVar[str] = "no person answered within"


Table = PythonTable | HttpTable | McpTable | ModelTable | PersonTable


_KINDS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(Table)
}


class _ToolFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tool: list[Annotated[Table, Field(discriminator="kind")]] = Field(min_length=1)


class Place:
    """The place of a table in its file, for errors. Tables are numbered from 1."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number

    def error(self, what: str, got: object, fix: str) -> ConfigError:
        return ConfigError(f"{self.path}, tool {self.number}: {what}", got=got, fix=fix)

    def expand(self, text: str, key: str) -> str:
        """Replace the variables in a text. Raises `ConfigError` for variables that are not set."""
        missing = [name for name in _VARIABLE.findall(text) if name not in os.environ]
        if missing:
            raise self.error(f"{key} needs a variable that is not set", ", ".join(missing), "set it in the environment")
        return _VARIABLE.sub(lambda match: os.environ[match[1]], text)


def read_tables(path: Path) -> list[tuple[Place, Table]]:
    """Read the tables of a TOML file with their places. Raises `ConfigError` for the first mistake."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "the file of tools cannot be read", got=error, fix="give the path of a .py or .toml"
        ) from error
    except ValueError as error:  # TOML's and UTF-8's
        raise ConfigError(f"{path} is no TOML", got=error, fix="mend it there") from error
    try:
        tables = _ToolFile.model_validate(content).tool
    except ValidationError as error:
        raise _mistake(error, path) from error
    return [(Place(path, number), table) for number, table in enumerate(tables, 1)]


def _mistake(error: ValidationError, path: Path) -> ConfigError:
    first = error.errors()[0]
    place = [*map(str, first["loc"]), "", ""]
    if place[0] != "tool" or not place[1]:
        return ConfigError(f"{path} is no list of tools", got=place[0], fix="begin every tool by [[tool]]")
    table, key = Place(path, int(place[1]) + 1), ".".join(place[3:-2])
    match first["type"]:
        case "union_tag_invalid" | "union_tag_not_found":
            kind = first.get("ctx", {}).get("tag", "")
            return table.error(
                "kind says what it is", kind + nearest(kind, list(_KINDS)), f"one of {', '.join(_KINDS)}"
            )
        case "extra_forbidden":
            keys = list(_KINDS[place[2]].model_fields)
            return table.error("no such key", key + nearest(key, keys), f"the keys are {', '.join(keys)}")
        case "missing":
            return table.error("a key is missing", f"no {key}", f"{key} = …")
        case "value_error":
            return table.error(
                first["msg"].removeprefix("Value error, "), ", ".join(first["input"]), "give the keys of one of them"
            )
    return table.error(f"{key} does not fit", repr(first["input"])[:80], first["msg"])
