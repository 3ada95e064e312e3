"""The tool-call formats of the model families that the engine loads, by the names that vLLM's `--tool-call-parser` uses."""

from collections.abc import Mapping
from types import MappingProxyType

from jinfercept.parsers.call_lists import APRIEL, FIREFUNCTION, GRANITE, NEMOTRON
from jinfercept.parsers.harmony import OPENAI
from jinfercept.parsers.hermes import HERMES
from jinfercept.parsers.llama import LLAMA3_JSON
from jinfercept.parsers.mistral import MISTRAL
from jinfercept.parsers.pythonic import PYTHONIC
from jinfercept.parsers.qwen_coder import QWEN3_CODER
from jinfercept.parsers.tool_call_format import ToolCallFormat

FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        "mistral": MISTRAL,  # and Ministral, Devstral, Magistral
        "qwen3_coder": QWEN3_CODER,  # and Qwen 3.5
        "apriel": APRIEL,  # Apriel Nemotron
        "hermes": HERMES,  # Hermes 2 and 3, Qwen 2.5 and 3
        "pythonic": PYTHONIC,  # Llama 3.2 when asked for a list of calls, ToolACE
        "llama3_json": LLAMA3_JSON,  # Llama 3.1, 3.2, 3.3
        "openai": OPENAI,  # gpt-oss
        "granite": GRANITE,  # 3.0 to 3.3
        "nemotron_json": NEMOTRON,  # Llama-3.1-Nemotron-Nano
        "firefunction": FIREFUNCTION,
    }
)
"""All formats by name. `detect_format` tries them in this order."""

ALIASES: Mapping[str, str] = MappingProxyType({"qwen3_xml": "qwen3_coder"})
"""Other names that vLLM has for them."""


def detect_format(chat_template: str) -> str | None:
    """The name of the first format that a chat template asks its model for; None if there is none.

    Args:
        chat_template: the Jinja source; it shows the format where it describes tools and where it writes earlier calls.
    """
    template = chat_template.replace('\\"', '"')
    return next((name for name, form in FORMATS.items() if form.detect(template)), None)
