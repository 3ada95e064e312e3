"""Options of the server: the fields are flags of `jinfercept serve`. Imports no JAX."""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from jinfercept.chat.parsers.cml import DELIMITERS, Delimiters
from jinfercept.chat.parsers.formats import check_parsers
from jinfercept.config import check_bounds, option
from jinfercept.errors import ConfigError, shown
from jinfercept.serve.access.key_file import KeyRules, key_digest, read_key_file
from jinfercept.serve.http.allowed_hosts import AllowedHosts, check_allowed_hosts

if TYPE_CHECKING:
    from jinfercept.serve.state.database import StateDatabase

log = logging.getLogger(__name__)

KEY_VARIABLE = "JINFERCEPT_API_KEY"
STATE_VARIABLE = "JINFERCEPT_STATE_URL"


@dataclass(frozen=True)
class ServerOptions:
    """How requests reach the model. Names as in `vllm serve` where the meaning is the same; tuples are flags that repeat."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every one of the machine")
    port: int = option(8000, "port to listen on; 0: a free one, which is printed", least=0, most=65535)
    uds: str | None = option(None, "path of a Unix socket to listen on instead")
    served_model_name: tuple[str, ...] = option((), "name by which clients ask for the model; default: MODEL")
    api_key: tuple[str, ...] = option(
        (),
        f"a key that clients have to bring; clients of one key share no cached context with others; "
        f"/health, /ready, /version, /metrics and the empty page at / need none. Also ${KEY_VARIABLE}",
    )
    operator_key: tuple[str, ...] = option(
        (), "a key that also sees and answers the calls of all clients in the inbox; other keys: their own"
    )
    api_key_file: str | None = option(
        None,
        "a TOML file of API keys, their names, priorities, weights and limits; it is read again when it changes; see "
        "docs/serving.md",
    )
    lora_dir: str | None = option(
        None,
        "a folder of adapters that may be loaded and unloaded while the server runs, by operators where clients need keys; "
        "default: none may",
    )
    weights_dir: str | None = option(
        None,
        "a folder of checkpoints whose weights the server may take while it runs; opens /pause, /resume, /sleep, /wake_up and "
        "/update_weights, to operators where clients need keys; default: none may",
    )
    chat_template: str | None = option(None, "a Jinja file instead of the model's template")
    tool_call_parser: str | None = option(None, "how the model writes calls; default: as its template shows")
    reasoning_parser: str = option(
        "auto", "how the model marks its reasoning; auto: as its template shows; none: reasoning is text"
    )
    special_tokens_in_text: bool = option(
        False,
        "names of special tokens in messages become these tokens, so that any text in them can begin a system turn",
    )
    tools: tuple[str, ...] = option(
        (), "a file of tools, .toml or .py, that the server runs for requests that ask for them; see docs/tools.md"
    )
    mcp: bool = option(False, "offer the model as an MCP server at /mcp; see docs/tools.md")
    max_tool_rounds: int = option(
        32, "limit of turns whose calls the server runs for one answer; 8 for requests that set none", least=0
    )
    max_pending_calls: int = option(
        32, "limit of one request's asynchronous calls that run at once; see docs/async_calls.md", least=1
    )
    max_pending_calls_per_key: int = option(
        512, "asynchronous calls that run at once for all requests of one key", least=1
    )
    call_delimiters: str | None = option(
        None,
        "texts that begin a call, its code, the end of a frame, a trap and an interrupt, with commas, as the model knows them; "
        "default: [CALL],[HEAD],[END],[TRAP],[INTR]",
    )
    max_body_size: int = option(4 * 2**20, "bytes of the largest request body", least=1)
    max_prompt_chars: int | None = option(
        None, "characters of the longest prompt; default: 16 for each token of --max-model-len, at least 65536", least=1
    )
    max_queue_len: int = option(
        1024,
        "requests that may wait for their turn, each prompt and each of its n answers counted; more are answered 429",
        least=1,
    )
    state_url: str | None = option(
        None,
        "database of responses and conversations that outlive the server: a path or sqlite:///PATH, or "
        f"postgresql+psycopg://USER:PASSWORD@HOST/DATABASE; default: memory. Also ${STATE_VARIABLE}; see docs/state.md",
    )
    max_state_bytes: int = option(
        2**33,
        "bytes of responses and conversations, in memory 512 MiB at most; beyond it the key with the most loses its oldest",
        least=0,
    )
    max_state_bytes_per_key: int | None = option(
        None, "bytes of responses and conversations of one key; default: all", least=0
    )
    response_ttl: float = option(
        86400.0,
        "seconds for which a response is stored, so that requests can name it as their previous one, and a conversation "
        "since its last change",
        least=0,
    )
    max_background_responses: int = option(
        128, "background responses of one key at a time; more are answered 429", least=0
    )
    header_timeout: float = option(10.0, "seconds until the head of a request has to be there", least=0.001)
    body_timeout: float = option(60.0, "seconds until the body of a request has to be there", least=0.001)
    write_timeout: float = option(60.0, "seconds without a byte read by a client until it counts as gone", least=0.001)
    max_connections: int = option(
        2048,
        "connections at once, fewer if the limit of open files is too low; more are answered 503 and closed",
        least=1,
    )
    max_websockets: int = option(
        256, "WebSockets of one key at once; all keys together may have half of --max-connections", least=1
    )
    timeout_keep_alive: int = option(5, "seconds that an idle connection is kept open", least=0)
    drain_timeout: float = option(30.0, "seconds that requests may go on after SIGTERM", least=0)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "a name by which clients reach the server, beside localhost and IP addresses; *.example.org: every name below it; "
        "*: every name; default: only those two where clients need no key, else every name",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "an origin whose web pages may use the server (CORS); *: all; default: the server's own"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "an HTTP method that web pages of allowed origins may use")
    allowed_headers: tuple[str, ...] = option(("*",), "an HTTP header that web pages of allowed origins may send")
    allow_credentials: bool = option(False, "web pages of allowed origins may send cookies")
    show_texts: bool = option(
        False,
        "the live page at / shows arguments of calls and the ends of answers: to a key its own, to an operator all",
    )
    log_format: Literal["text", "json"] = option("text", "a line for each request, as key=value or as JSON")
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of a collector for OpenTelemetry traces (OTLP over HTTP), such as http://127.0.0.1:4318; default: as the OTEL_* "
        "variables say, else no traces; see docs/operations.md",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.state_url is not None and not self.state_url.strip():
            raise ConfigError(
                "state_url names no database", got=shown(self.state_url), fix="leave it out to store in memory"
            )
        if not all(self.served_model_name):
            raise ConfigError("served_model_name must not be empty", got="''", fix="leave it out, or give one")
        for name in ("lora_dir", "weights_dir"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(f"{name} is not a folder", got=shown(folder), fix="make it, or name another one")
        if self.mcp and find_spec("mcp") is None:
            raise ConfigError(
                "the MCP server needs one more package", got="no mcp", fix="pip install 'jinfercept[tools]'"
            )
        reasoning = None if self.reasoning_parser == "none" else self.reasoning_parser
        check_parsers(self.tool_call_parser, reasoning, ConfigError)
        check_allowed_hosts(self.allowed_hosts)
        self.delimiters()
        self.template()
        self.key_rules()
        self.traces()

    def check_adapters(self, names: Iterable[str], adapters: Iterable[str], num_slots: int) -> None:
        """Raise `ConfigError` for an adapter with a name of the model, and for `lora_dir` without room for adapters."""
        if both := sorted({*names} & {*adapters}):
            raise ConfigError("an adapter has the name of the model", got=", ".join(both), fix="give it another one")
        if self.lora_dir is not None and not num_slots:
            raise ConfigError("there is no room for adapters", got="lora_dir", fix="give --max-loras too")

    def delimiters(self) -> Delimiters:
        """The delimiters of asynchronous calls. Raises `ConfigError` for texts that cannot be told apart."""
        texts = DELIMITERS if self.call_delimiters is None else self.call_delimiters.split(",")
        delimiters = Delimiters(*texts) if len(texts) == len(DELIMITERS) else None
        if delimiters is None or not delimiters.are_distinct:
            raise ConfigError(
                "call_delimiters must be five texts of at least two characters, none of which contains or overlaps another",
                got=self.call_delimiters,
                fix=f"such as {','.join(DELIMITERS)}",
            )
        return delimiters

    def hosts(self) -> AllowedHosts | None:
        """The hosts that requests may name; None: any, where no flag names some, and clients bring a key or use a Unix socket.

        Web pages have no key, and reach no Unix socket.
        """
        if not self.allowed_hosts and (self.uds is not None or self.key_rules()):
            return None
        return AllowedHosts((*self.allowed_hosts, self.host))

    def database_url(self) -> str | None:
        """URL or path of the database of the stored state: of the flag, or else of the environment; None: in memory."""
        return self.state_url or os.environ.get(STATE_VARIABLE) or None

    def open_state(self, timeout_s: float = 5.0) -> "StateDatabase":
        """The database of the stored state, see `StateDatabase`. Raises `ConfigError`."""
        from jinfercept.serve.state.database import StateDatabase
        from jinfercept.serve.state.entries import StateLimits

        limits = StateLimits(self.response_ttl, self.max_state_bytes, self.max_state_bytes_per_key)
        return StateDatabase(self.database_url(), limits, timeout_s)

    def template(self) -> str | None:
        """The chat template's source, if a file of one is named. Raises `ConfigError` if it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the chat template cannot be read", got=error, fix="give a file of Jinja source"
            ) from error

    def traces(self) -> str | None:
        """Where traces are exported to, see `traces_endpoint`; None: nowhere. Raises `ConfigError`."""
        return traces_endpoint(self.otlp_traces_endpoint, os.environ)

    def key_rules(self) -> dict[str, KeyRules]:
        """Rules of each API key, by its digest: those of flags, of the environment and of the file. Empty: no key is needed.

        Raises:
            ConfigError: the file cannot be used.
        """
        rules: dict[str, KeyRules] = {}
        environment = os.environ.get(KEY_VARIABLE)
        for key in (*self.api_key, *(() if environment is None else (environment,)), *self.operator_key):
            if not key or key != key.strip():
                raise ConfigError(
                    "an API key is empty, or has blanks around it",
                    got=f"one of --api-key, --operator-key and ${KEY_VARIABLE}",
                    fix="give a key, or neither the flag nor the variable: then every request may come",
                )
            digest = key_digest(key)
            rules[digest] = KeyRules(name=f"key-{digest[:8]}", operator=key in self.operator_key)
        return rules | (read_key_file(self.api_key_file) if self.api_key_file is not None else {})


_TRACE_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def traces_endpoint(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """The URL of a collector's `/v1/traces`, "" if the exporter reads it from the environment; None: there are no traces.

    Variables without the packages are logged only: they may be meant for other processes.

    Raises:
        ConfigError: the flag's URL is wrong, or packages are missing for it.
    """
    if flag is None and not any(environ.get(name) for name in _TRACE_VARIABLES):
        return None
    endpoint, is_installed = "" if flag is None else _trace_url(flag), traces_are_installed()
    if not is_installed and flag is not None:
        fix = "pip install 'jinfercept[otel]'"
        raise ConfigError("traces need more packages", got=f"--otlp-traces-endpoint {flag}", fix=fix)
    if not is_installed:
        log.warning("OTEL_* variables name a collector, and there are no traces; fix: pip install 'jinfercept[otel]'")
        return None
    return endpoint


def traces_are_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _trace_url(endpoint: str) -> str:
    """The URL; one without a path gets that of OTLP. Raises `ConfigError`."""
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        url, is_url = urlsplit(""), False
    if not is_url:
        fix = "the URL of a collector that speaks OTLP over HTTP, such as http://127.0.0.1:4318"
        raise ConfigError("otlp_traces_endpoint is not a URL", got=endpoint, fix=fix)
    return url._replace(path="/v1/traces").geturl() if url.path in ("", "/") else endpoint
