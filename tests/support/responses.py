"""`/v1/responses` for tests: a question, a tool, and a client that asks."""

from typing import Any

from tests.support.live_server import MODEL, Running, prompt_of
from tests.support.scripted_model import Scripted

QUESTION = "How much is a lamp?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
PEN = CALL.replace("lamp", "pen")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE: Any = {"type": "function", "name": "price", "description": "The price of an item.", "parameters": SCHEMA}
CHAT_PRICE: Any = {
    "type": "function",
    "function": {"name": "price", "description": "The price of an item.", "parameters": SCHEMA},
}


def says(scripted: Scripted, text: str, messages: Any = ASKED, tools: Any = (), **options: Any) -> None:
    """Have the model answer a conversation with a text."""
    scripted.follow(prompt_of(scripted, messages, tools, **options) + text)


def answer(served: Running, question: Any = QUESTION, **fields: Any) -> Any:
    """OpenAI's client, without chance."""
    create: Any = served.client.responses.create
    return create(**({"model": MODEL, "input": question, "temperature": 0} | fields))
