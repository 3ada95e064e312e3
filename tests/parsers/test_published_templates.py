"""Chat templates of published models show tools and calls, and the calls that they write are read back.

The templates are those in the source package of llama-cpp-python, which pip downloads into the folder of downloads.
"""

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept.chat.template import ChatTemplate
from jinfercept.events import CallEnded
from jinfercept.parsers.formats import FORMATS, detect_format
from tests.support.published_package import published_package
from tests.support.scripted_model import byte_tokenizer

FOLDER = "vendor/llama.cpp/models/templates/"
EXPECTED = {
    "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "MiniMax-M2": "minimax_m2",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Spark2.5": "glm45",
    "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "inclusionai-ling-3.0-flash": "glm45",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "poolside-Laguna-S-2.1": "glm45",
    "poolside-Laguna-XS-2.1": "glm45",
    "poolside-Laguna-XS.2": "glm45",
    "tencent-Hy3": "hy_v3",
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command4",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "GigaChat3.1-10B-A1.8B": "gigachat3",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2.5-8B-A1B": "lfm2",
    "MiniMax-M1": "minimax",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "meetkai-functionary-medium-v3.1": "functionary_v31",
    "moonshotai-Kimi-K2": "kimi_k2",
    "unsloth-Apriel-1.5": "apriel",
    "upstage-Solar-Open-100B": "solar_open",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "MiMo-VL": "hermes",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Reka-Edge": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
}
"""The formats of the templates that show tools, and write calls of earlier turns where they are compared here."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "which"},
        "exact": {"type": "boolean", "description": "whether"},
    },
    "required": ["city", "days"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Finds the zephyr.", "parameters": PARAMETERS},
}
VALUES = {"city": "São Paulo", "days": 3, "tags": ["a", 'b "c"'], "exact": True}
QUESTION = {"role": "user", "content": "How is it there?"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(VALUES, ensure_ascii=False)},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "Misty and mild."}


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """The sources by name."""
    sources: dict[str, str] = {}
    with tarfile.open(published_package()) as package:
        for member in package:
            if FOLDER in member.name and member.name.endswith(".jinja"):
                content = package.extractfile(member)
                assert content is not None
                sources[Path(member.name).stem] = content.read().decode()
    return sources


def rendered(source: str, *messages: dict[str, Any], ask: bool) -> str:
    template = ChatTemplate(byte_tokenizer(None), [TOOL], source, {}, ())
    return template.render(messages, add_generation_prompt=ask)


def turn_with_a_call(source: str) -> str:
    """The turn of a model that calls, as the template writes it, without empty reasoning."""
    asked = rendered(source, QUESTION, ask=True)
    whole = rendered(source, QUESTION, CALLING, ask=False)
    begins = next((at for at, pair in enumerate(zip(asked, whole, strict=False)) if len({*pair}) == 2), len(asked))
    return re.sub(r"^\s*(<\S*think\S*>)?\s*(</\S*think\S*?>)\s*", "", whole[begins:])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_format_of_a_published_template_is_found_and_its_calls_are_read(
    templates: dict[str, str], name: str
) -> None:
    source = templates[name]
    assert detect_format(source) == EXPECTED[name]
    conversation = rendered(source, QUESTION, CALLING, RESULT, ask=True)
    for shown in ("get_weather", "Finds the zephyr.", "Misty and mild."):
        assert shown in conversation
    turn = turn_with_a_call(source)
    parser = replace(FORMATS[EXPECTED[name]], tools={"get_weather": PARAMETERS}).parser()
    pieces = [piece for char in turn for piece in parser.feed(char)] + parser.finish()
    (call,) = [piece.call for piece in pieces if isinstance(piece, CallEnded)]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", VALUES), turn
