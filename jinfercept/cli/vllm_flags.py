"""Flags of `vllm serve` for which there is nothing to do here: commands that have them go on, and the log says why.

A value that asks for something which cannot be done is refused. Flags that have another name here are refused with that name.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple, final


class Flag(NamedTuple):
    """One of them.

    Attributes:
        why: there is nothing to do.
        values: at which it asks for nothing; of none: at any. None: it takes no value.
        short: another way to write it.
    """

    why: str
    values: tuple[str, ...] | None = None
    short: str | None = None


_ONE_DEVICE = "a server runs on one device"
_COMPILED = "everything is compiled at the start, and nothing afterwards"

UNNEEDED = {
    "--enable-auto-tool-choice": Flag("tools are called wherever the model's template knows them"),
    "--enable-chunked-prefill": Flag("prompts are computed in chunks; --chunked-prefill forces it for every policy"),
    "--enable-prompt-tokens-details": Flag("usage always has them"),
    "--enable-request-id-headers": Flag("every answer has its x-request-id"),
    "--enforce-eager": Flag(_COMPILED),
    "--compilation-config": Flag(_COMPILED, (), "-O"),
    "--async-scheduling": Flag("--pipeline-depth 1 is the default"),
    "--trust-remote-code": Flag("code from a model's repository is never run"),
    "--disable-log-requests": Flag("what is said in requests is never logged"),
    "--no-enable-log-requests": Flag("what is said in requests is never logged"),
    "--disable-log-stats": Flag("statistics are not logged; /metrics has them"),
    "--disable-uvicorn-access-log": Flag("a line for each request is all that is logged"),
    "--max-log-len": Flag("what is said in requests is never logged", ()),
    "--uvicorn-log-level": Flag("the log has one level", ()),
    "--disable-frontend-multiprocessing": Flag("a server is one process"),
    "--api-server-count": Flag("a server is one process", ("1",)),
    "--tensor-parallel-size": Flag(_ONE_DEVICE, ("1",), "-tp"),
    "--pipeline-parallel-size": Flag(_ONE_DEVICE, ("1",), "-pp"),
    "--data-parallel-size": Flag(_ONE_DEVICE, ("1",), "-dp"),
    "--distributed-executor-backend": Flag(_ONE_DEVICE, ("mp", "uni")),
    "--cpu-offload-gb": Flag("weights stay on the device", ("0", "0.0")),
    "--kv-cache-dtype": Flag("KV has the type of the weights", ("auto",)),
    "--tokenizer-mode": Flag("the tokenizer is the model's", ("auto",)),
    "--config-format": Flag("the format is seen from the files", ("auto", "hf")),
    "--runner": Flag("a server generates", ("auto", "generate")),
    "--task": Flag("a server generates", ("auto", "generate")),
    "--convert": Flag("a server generates", ("auto", "none")),
    "--scheduling-policy": Flag("requests are served by priority, then by arrival", ("fcfs", "priority")),
    "--chat-template-content-format": Flag("the parts of a text are joined", ("auto", "string")),
    "--response-role": Flag("answers are the assistant's", ("assistant",)),
}
"""By their names."""

RENAMED = {
    "--block-size": "--page-size",
    "--num-gpu-blocks-override": "--kv-tokens, in tokens",
    "--kv-offloading-size": "--swap-space",
    "--no-enable-chunked-prefill": "--no-chunked-prefill",
    "--revision": "part of the model's name: owner/name@revision",
    "--tool-server": "--tools",
}
"""What flags that are refused are called here."""


def add_unneeded(parser: argparse.ArgumentParser) -> None:
    """Take these flags, without showing them in the help; `unneeded` lists what is to be said of those that were given."""
    for name, flag in UNNEEDED.items():
        names = [name] if flag.short is None else [name, flag.short]
        parser.add_argument(*names, action=_Unneeded, nargs=0 if flag.values is None else None)
    for name in RENAMED:
        parser.add_argument(name, action=_Renamed, nargs="?")


@final
class _Unneeded(argparse.Action):
    """Notes one of them."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, "unneeded", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = self.option_strings[0]
        flag = UNNEEDED[name]
        if flag.values and values not in flag.values:
            wanted = " or ".join(flag.values)
            raise argparse.ArgumentError(self, f"{flag.why}; got {values}; fix: leave it out, or give {wanted}")
        told = f"{name} is not needed: {flag.why}"
        namespace.unneeded = list(dict.fromkeys([*getattr(namespace, "unneeded", ()), told]))


@final
class _Renamed(argparse.Action):
    """Refuses one that has another name."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise argparse.ArgumentError(self, f"here it is {RENAMED[self.option_strings[0]]}")
