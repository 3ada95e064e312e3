"""`jinfercept run`: completes a prompt, or chats. Its imports wait until it runs."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from jinfercept.cli.options import Maybe, ModelName, Repeated, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.errors import RequestError

if TYPE_CHECKING:
    from jinfercept.chat.tokenizer.tokenizer import Tokenizer
    from jinfercept.sampling_params import SamplingParams

type _File = Annotated[str | None, conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclass(frozen=True)
class ChatFlags:
    system: Maybe[str] = None
    """system message that the conversation begins with"""
    tools: _File = None
    """a Python file, whose documented functions the model may call, or a TOML file of tools"""
    chat_template: _File = None
    """a Jinja file instead of the model's template"""
    tool_call_parser: Maybe[str] = None
    """how the model writes calls (default: as its template shows)"""
    reasoning_parser: Maybe[str] = None
    """how the model marks its reasoning, or none (default: as its template shows)"""
    max_rounds: Maybe[int] = None
    """turns whose calls are run, for one answer (default: 8)"""


@dataclass(frozen=True)
class SamplingFlags:
    temperature: Maybe[float] = None
    """0 is greedy (default: the model's, else 0)"""
    top_p: Maybe[float] = None
    """share of the probability that is drawn from"""
    top_k: Maybe[int] = None
    """tokens that are drawn from"""
    min_p: Maybe[float] = None
    """least probability, as a share of the greatest"""
    repetition_penalty: Maybe[float] = None
    """above 1: fewer tokens of prompt and answer again"""
    presence_penalty: Maybe[float] = None
    """above 0: fewer tokens of the answer again"""
    frequency_penalty: Maybe[float] = None
    """above 0: fewer tokens again that the answer has often"""
    stop: Repeated = ()
    """text that ends the answer"""


@dataclass(frozen=True, kw_only=True)
class RunModel:
    model: ModelName
    prompt: Maybe[str] = None
    """complete this text and end; without it: a chat"""
    max_tokens: Maybe[int] = None
    """tokens to generate (default: the model's, else 256; 1024 for a chat's answer)"""
    chat: ChatFlags = ChatFlags()
    sampling: SamplingFlags = SamplingFlags()
    engine: Annotated[EngineOptions, engine_flags()]

    def run(self) -> int:
        """Generate, and return 0. Raises `JinferceptError` for what cannot work, before the weights are loaded if possible."""
        from jinfercept.chat.parsers.formats import check_parsers
        from jinfercept.llm import LLM
        from jinfercept.start.progress import StartDisplay

        chat = self._chat_options()
        params = self._params()
        check_parsers(chat.get("tool_call_parser"), chat.get("reasoning_parser", "auto"))
        tokenizer = None
        with ExitStack() as ends, StartDisplay(notes=True) as progress:
            if "tools" in chat:
                from jinfercept.tools.load import load_tools

                loaded = ends.enter_context(load_tools(chat["tools"]))
                chat |= {"tools": loaded.tools, "inbox": loaded.inbox}
                tokenizer = _check_tools(self.model, chat)
            llm = ends.enter_context(LLM(self.model, progress=progress, tokenizer=tokenizer, **self.engine))
            progress.close()
            params = self._params(llm.sampling_defaults)
            if self.prompt is not None:
                from jinfercept.cli.terminal_chat import harmless
                from jinfercept.events import Finished, Resumed, Token

                for event in llm.stream(self.prompt, params):
                    if isinstance(event, Token | Resumed | Finished):
                        print(harmless(event.text) if sys.stdout.isatty() else event.text, end="", flush=True)
                print(flush=True)
            else:
                from jinfercept.cli.terminal_chat import TerminalChat, lines

                talk = TerminalChat(llm, params, **chat)
                with lines() as ask:
                    talk.run(ask)
        return 0

    def _chat_options(self) -> dict[str, Any]:
        chat = _given(self.chat)
        if self.prompt is not None and chat:
            flags = ", ".join("--" + name.replace("_", "-") for name in chat)
            raise RequestError(
                "these flags need a chat", got=f"--prompt and {flags}", fix="pipe the question in instead"
            )
        if self.prompt == "":
            raise RequestError(
                "a prompt needs at least one token", got="--prompt ''", fix="give a text, or leave it out to chat"
            )
        if "chat_template" in chat:
            chat["chat_template"] = _read(chat["chat_template"])
        if chat.get("reasoning_parser") == "none":
            chat["reasoning_parser"] = None
        return chat

    def _params(self, of_checkpoint: Mapping[str, Any] = MappingProxyType({})) -> "SamplingParams":
        from jinfercept.sampling_params import SamplingParams

        defaults = {"temperature": 0.0, "max_tokens": 256 if self.prompt is not None else 1024}
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return SamplingParams(**{**defaults, **of_checkpoint, **_given(self.sampling), **limit})


def _check_tools(model: str, chat: Mapping[str, Any]) -> "Tokenizer | None":
    from jinfercept.chat.chats import ChatPlan
    from jinfercept.chat.function_tools import chat_tools
    from jinfercept.chat.options import ChatOptions
    from jinfercept.chat.tokenizer.load import load_tokenizer
    from jinfercept.models.load import locate

    # a chat that cannot work with these tools is refused before the weights are loaded
    tokenizer = load_tokenizer(locate(model))
    options = ChatOptions(**{name: value for name, value in chat.items() if name in ChatOptions.__annotations__})
    ChatPlan(chat_tools(chat["tools"]), options, tokenizer, None, ())
    return tokenizer


def _given(flags: ChatFlags | SamplingFlags) -> dict[str, Any]:
    return {name: value for name, value in asdict(flags).items() if value not in (None, ())}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("the chat template cannot be read", got=error, fix="give a file of Jinja source") from error
