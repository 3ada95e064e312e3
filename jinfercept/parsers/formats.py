"""The tool-call formats of all model families, by the names that vLLM's `--tool-call-parser` uses."""

from collections.abc import Mapping
from types import MappingProxyType

from jinfercept.parsers.call_lists import APRIEL, FIREFUNCTION, GRANITE, MINIMAX, NEMOTRON
from jinfercept.parsers.gemma import GEMMA4
from jinfercept.parsers.harmony import OPENAI
from jinfercept.parsers.hermes import HERMES
from jinfercept.parsers.llama import LLAMA3_JSON, LLAMA4_JSON
from jinfercept.parsers.minimax_m3 import MINIMAX_M3
from jinfercept.parsers.mistral import MISTRAL
from jinfercept.parsers.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.parsers.xml_families import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS

FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        "mistral": MISTRAL,  # and Ministral, Devstral, Magistral
        "qwen3_coder": QWEN3_CODER,  # and Qwen 3.5
        "apriel": APRIEL,
        "minimax": MINIMAX,  # M1
        "hermes": HERMES,  # Hermes 2 and 3, Qwen 2.5 and 3
        "glm45": GLM45,  # GLM 4.5 to 4.7, Ling 3, Laguna, Spark 2.5
        "minimax_m2": MINIMAX_M2,
        "minimax_m3": MINIMAX_M3,
        "seed_oss": SEED_OSS,
        "llama4_pythonic": LLAMA4_PYTHONIC,
        "llama4_json": LLAMA4_JSON,
        "pythonic": PYTHONIC,  # Llama 3.2 when asked for a list of calls, ToolACE
        "llama3_json": LLAMA3_JSON,  # Llama 3.1, 3.2, 3.3
        "openai": OPENAI,  # gpt-oss
        "gemma4": GEMMA4,
        "granite": GRANITE,  # 3.0 to 3.3
        "nemotron_json": NEMOTRON,  # Nemotron Nano v2
        "firefunction": FIREFUNCTION,
    }
)
"""All formats by name. `detect_format` tries them in this order."""

ALIASES: Mapping[str, str] = MappingProxyType({"qwen3_xml": "qwen3_coder", "glm47": "glm45"})
"""Other names that vLLM has for them."""


def detect_format(chat_template: str) -> str | None:
    """The name of the first format that a chat template asks its model for; None if there is none.

    Args:
        chat_template: the Jinja source; it shows the format where it describes tools and where it writes earlier calls.
    """
    template = chat_template.replace('\\"', '"')
    return next((name for name, form in FORMATS.items() if form.detect(template)), None)
