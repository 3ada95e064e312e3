"""jinfercept: a JAX serving engine for language models that call out while they write.

The public names are loaded when they are first used: importing the package imports no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinfercept.errors import ConfigError as ConfigError
    from jinfercept.errors import JinferceptError as JinferceptError
    from jinfercept.errors import ModelError as ModelError
    from jinfercept.errors import RequestError as RequestError
    from jinfercept.intercept.detector import ScriptedDetector as ScriptedDetector
    from jinfercept.intercept.detector import StopStringDetector as StopStringDetector
    from jinfercept.llm import LLM as LLM
    from jinfercept.request import Call as Call
    from jinfercept.request import RequestOutput as RequestOutput
    from jinfercept.request import SamplingParams as SamplingParams
    from jinfercept.request import Tool as Tool

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "jinfercept.errors",
    "JinferceptError": "jinfercept.errors",
    "ModelError": "jinfercept.errors",
    "RequestError": "jinfercept.errors",
    "ScriptedDetector": "jinfercept.intercept.detector",
    "StopStringDetector": "jinfercept.intercept.detector",
    "LLM": "jinfercept.llm",
    "Call": "jinfercept.request",
    "RequestOutput": "jinfercept.request",
    "SamplingParams": "jinfercept.request",
    "Tool": "jinfercept.request",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jinfercept' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
