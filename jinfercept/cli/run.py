"""`jinfercept run`: its flags, and what it does. Imports what it needs when it runs."""

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jinfercept.chat.options import check_parsers
from jinfercept.cli.flags import MODEL_HELP
from jinfercept.cli.start_log import start_log

_SAMPLING = {
    "top_p": (float, "share of the probability that is drawn from"),
    "top_k": (int, "tokens that are drawn from"),
    "min_p": (float, "least probability, as a share of the greatest"),
    "repetition_penalty": (float, "above 1: less of what was said"),
    "presence_penalty": (float, "above 0: less of what was written"),
    "frequency_penalty": (float, "above 0: less of what was written often"),
}
_CHAT = ("system", "tools", "chat_template", "tool_call_parser", "reasoning_parser", "max_rounds")


def add_arguments(run: argparse.ArgumentParser) -> None:
    """The flags that are not the engine's."""
    run.add_argument("model", help=MODEL_HELP)
    run.add_argument("--prompt", help="complete this text and end; without it: a chat")
    run.add_argument(
        "--max-tokens", type=int, help="tokens to generate (default: the model's, else 256; 1024 for a chat's answer)"
    )
    chat = run.add_argument_group("chat")
    chat.add_argument("--system", help="what the model is told first")
    chat.add_argument(
        "--tools",
        metavar="FILE",
        help="a Python file, whose documented functions the model may call, or a TOML file of tools",
    )
    chat.add_argument("--chat-template", metavar="FILE", help="a Jinja file instead of the model's template")
    chat.add_argument("--tool-call-parser", help="how the model writes calls (default: as its template shows)")
    chat.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="how the model marks what it thinks, or none (default: as its template shows)",
    )
    chat.add_argument("--max-rounds", type=int, help="turns whose calls are run, for one answer (default: 8)")
    sampling = run.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, help="0 is greedy (default: the model's, else 0)")
    for name, (kind, text) in _SAMPLING.items():
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    sampling.add_argument("--stop", action="append", help="text that ends the answer; may be repeated")


def run(model: str, prompt: str | None, **rest: Any) -> int:
    """Complete a prompt, or chat. `rest` are the other flags, the engine's among them."""
    from jinfercept.cli.terminal import complete
    from jinfercept.cli.terminal_chat import TerminalChat, lines
    from jinfercept.endpoints.load import load_tools
    from jinfercept.errors import RequestError
    from jinfercept.llm import LLM
    from jinfercept.request import SamplingParams
    from jinfercept.startup.progress import StartDisplay

    sampling = _given(rest, ("temperature", "max_tokens", *_SAMPLING, "stop"))
    chat = _given(rest, _CHAT)
    if prompt is not None and chat:
        flags = ", ".join("--" + name.replace("_", "-") for name in chat)
        raise RequestError("these belong to a chat", got=f"--prompt and {flags}", fix="pipe the question in instead")
    if prompt == "":
        raise RequestError(
            "a prompt needs at least one token", got="--prompt ''", fix="give a text, or leave it out to chat"
        )
    defaults = {"temperature": 0.0, "max_tokens": 256 if prompt is not None else 1024}
    params = SamplingParams(**(defaults | sampling))
    if "chat_template" in chat:
        chat["chat_template"] = _read(chat["chat_template"])
    if chat.get("reasoning_parser") == "none":
        chat["reasoning_parser"] = None
    check_parsers(chat.get("tool_call_parser"), chat.get("reasoning_parser", "auto"))
    with ExitStack() as ends, StartDisplay() as progress:
        if "tools" in chat:
            loaded = ends.enter_context(load_tools(chat["tools"]))
            chat |= {"tools": loaded.tools, "inbox": loaded.inbox}
            rest["tokenizer"] = _check_tools(model, params, chat)
        with start_log():
            llm = ends.enter_context(LLM(model, progress=progress, **rest))
        progress.close()
        params = SamplingParams(**{**defaults, **llm.sampling_defaults, **sampling})
        if prompt is not None:
            complete(llm, prompt, params)
            return 0
        talk = TerminalChat(llm, params, **chat)
        with lines() as ask:
            talk.run(ask)
    return 0


def _check_tools(model: str, params: Any, chat: Mapping[str, Any]) -> Any:
    """The model's tokenizer; raises what a chat with these tools would raise, before the weights are loaded."""
    from jinfercept.chat.chats import make_chats
    from jinfercept.chat.options import ChatOptions
    from jinfercept.models.load import locate
    from jinfercept.tokenizer.load import load_tokenizer

    tokenizer = load_tokenizer(locate(model))
    options = ChatOptions(**{name: value for name, value in chat.items() if name in ChatOptions.__annotations__})
    make_chats((), [], params, chat["tools"], options, tokenizer, None, ())
    return tokenizer


def _given(flags: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take these flags out; those that were given are returned."""
    taken = {name: flags.pop(name) for name in names}
    return {name: value for name, value in taken.items() if value is not None}


def _read(path: str) -> str:
    from jinfercept.errors import RequestError

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("the chat template cannot be read", got=error, fix="give a file of Jinja source") from error
