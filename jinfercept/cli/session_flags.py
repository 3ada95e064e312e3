"""Flags of the commands that ask servers: which servers, the shape of a session, and files to write."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro import conf

from jinfercept.bench.conversations import Style
from jinfercept.bench.servers import Servers
from jinfercept.bench.session_shape import SessionShape
from jinfercept.bench.tool_times import tool_times
from jinfercept.cli.options import Maybe, Repeated
from jinfercept.config import EngineOptions

type OwnModel = Annotated[
    conf.Positional[str | None],
    conf.arg(
        metavar="[MODEL]",
        help="start jinfercept serve with it: smollm2-135m, a Hugging Face directory or hub id, or a .gguf file",
        help_behavior_hint="",
    ),
]


@dataclass(frozen=True)
class ServerFlags:
    base_url: Annotated[Repeated, conf.arg(metavar="[NAME=]URL")] = ()
    """of a server that runs; several are compared"""
    model: Maybe[str] = None
    """to ask it for (default: the first that it names)"""
    api_key: Maybe[str] = None
    """to send (default: none)"""
    timeout: float = 600.0
    """seconds of a request"""

    def servers(self, own: str | None, engine: EngineOptions) -> Servers:
        """The servers at URLs, or one of a model of its own, with these options."""
        return Servers(self.base_url, self.model, self.api_key, self.timeout, own, engine)


@dataclass(frozen=True)
class ShapeFlags:
    system_tokens: int = 0
    """prompt that all sessions begin with; 0: none"""
    prompt_tokens: int = 900
    """prompt of a session's own"""
    turns: int = 4
    """answers of a session, between which a tool runs"""
    new_tokens: int = 16
    """of an answer"""
    tool_tokens: int = 40
    """of a tool's result"""
    tool_seconds: str = "0"
    """that a tool takes: X, exp:MEAN or lognormal:MEDIAN,SIGMA"""
    token_ids: Annotated[Maybe[int], conf.arg(metavar="BELOW")] = None
    """prompts of random token ids on /v1/completions, not words in a chat"""
    tool_role: Literal["tool", "user"] = "tool"
    """who brings a tool's result"""
    ignore_eos: bool = True
    """ask for all of --new-tokens, as vLLM's extension allows"""

    def style(self) -> Style:
        """How a client talks."""
        return Style(
            system_tokens=self.system_tokens,
            vocabulary=self.token_ids,
            tool_role=self.tool_role,
            ignore_eos=self.ignore_eos,
        )

    def shape(self) -> SessionShape:
        """The lengths of a session. Raises `ConfigError` for `tool_seconds` that are no duration."""
        seconds = tool_times(self.tool_seconds)
        return SessionShape(self.turns, self.prompt_tokens, self.tool_tokens, self.new_tokens, seconds)


@dataclass(frozen=True)
class OutputFlags:
    json: Maybe[str] = None
    """write everything to this file, a row for each request"""
    plot: Maybe[str] = None
    """draw it into this file"""
