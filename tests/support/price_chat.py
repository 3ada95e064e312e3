"""A conversation about prices: its question, the tool and its calls, and a model that answers with a text."""

from typing import Any

from tests.support.live_server import prompt_of
from tests.support.scripted_model import Scripted

QUESTION: Any = [{"role": "user", "content": "How much is a lamp?"}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
PEN = CALL.replace("lamp", "pen")
PRICE: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def says(scripted: Scripted, text: str, messages: Any = QUESTION, tools: Any = (), **options: Any) -> None:
    """Have the model answer a conversation with a text."""
    scripted.follow(prompt_of(scripted, messages, tools, **options) + text)
