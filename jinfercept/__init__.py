"""jinfercept: a JAX serving engine for language models that call out while they write.

The public names are loaded when they are first used: importing the package imports no JAX.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from jinfercept.version import __version__ as __version__

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers would ask for torch when it is imported

if TYPE_CHECKING:
    from jinfercept.calls import Call as Call
    from jinfercept.calls import Tool as Tool
    from jinfercept.chat.call_markup import AsyncCalls as AsyncCalls
    from jinfercept.chat.call_markup import markup_prompt as markup_prompt
    from jinfercept.chat.detector import FormatDetector as FormatDetector
    from jinfercept.chat.detector import RegexDetector as RegexDetector
    from jinfercept.chat.detector import ScriptedDetector as ScriptedDetector
    from jinfercept.chat.detector import StopStringDetector as StopStringDetector
    from jinfercept.chat.detector import TokenDetector as TokenDetector
    from jinfercept.chat.options import ChatOptions as ChatOptions
    from jinfercept.chat.parsers.cml import Delimiters as Delimiters
    from jinfercept.errors import ConfigError as ConfigError
    from jinfercept.errors import EngineError as EngineError
    from jinfercept.errors import JinferceptError as JinferceptError
    from jinfercept.errors import ModelError as ModelError
    from jinfercept.errors import RequestError as RequestError
    from jinfercept.events import Arguments as Arguments
    from jinfercept.events import Called as Called
    from jinfercept.events import CallEnded as CallEnded
    from jinfercept.events import CallStarted as CallStarted
    from jinfercept.events import Content as Content
    from jinfercept.events import Finished as Finished
    from jinfercept.events import Intercepted as Intercepted
    from jinfercept.events import Interrupted as Interrupted
    from jinfercept.events import Reasoning as Reasoning
    from jinfercept.events import Resumed as Resumed
    from jinfercept.events import Token as Token
    from jinfercept.llm import LLM as LLM
    from jinfercept.outputs import RequestOutput as RequestOutput
    from jinfercept.rollouts.samples import Rollout as Rollout
    from jinfercept.rollouts.samples import RolloutCall as RolloutCall
    from jinfercept.rollouts.samples import Rollouts as Rollouts
    from jinfercept.sampling_params import SamplingParams as SamplingParams
    from jinfercept.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from jinfercept.tools.load import LoadedTools as LoadedTools
    from jinfercept.tools.load import load_tools as load_tools

_NAMES = {
    "jinfercept.calls": "Call Tool",
    "jinfercept.chat.options": "ChatOptions",
    "jinfercept.errors": "ConfigError EngineError JinferceptError ModelError RequestError",
    "jinfercept.events": "Arguments Called CallEnded CallStarted Content Finished Intercepted Interrupted Reasoning Resumed"
    " Token",
    "jinfercept.chat.call_markup": "AsyncCalls markup_prompt",
    "jinfercept.chat.detector": "FormatDetector RegexDetector ScriptedDetector StopStringDetector TokenDetector",
    "jinfercept.llm": "LLM",
    "jinfercept.outputs": "RequestOutput",
    "jinfercept.chat.parsers.cml": "Delimiters",
    "jinfercept.rollouts.samples": "Rollout RolloutCall Rollouts",
    "jinfercept.sampling_params": "SamplingParams",
    "jinfercept.structured_outputs": "StructuredOutputsParams",
    "jinfercept.tools.load": "LoadedTools load_tools",
}
"""The public names, with spaces, by their modules."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jinfercept' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
