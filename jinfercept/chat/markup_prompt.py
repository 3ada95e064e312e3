"""A few-shot prompt for asynchronous calls in context markup language, for models that were not trained on it.

Four worked examples show independent calls, prose between a call and its result, a call that needs an earlier result, and an
error. Try whether a model follows them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jinfercept.chat.function_tools import ChatTool, ChatToolLike, chat_tools
from jinfercept.chat.parsers.cml import DELIMITERS, Delimiters, escape
from jinfercept.errors import RequestError, shown

STOP = "###"
"""Stands behind every example; a stop string for the answer."""

_HEAD = """\
Answer each request with its tools. A call is {call} id {head} tool(argument=value) {end} with a new id. \
{trap} {end} waits for all results. A result comes as {interrupt} id {head} result {end}; never write one yourself.
"""

_EXAMPLES = """
Tools:
population(city="..."): Inhabitants of a city.
Request: Which has more people, Oslo or Rome?
Answer:
{call} 1 {head} population(city="Oslo") {end}
{call} 2 {head} population(city="Rome") {end}
{trap} {end}
{interrupt} 1 {head} 717710 {end}{interrupt} 2 {head} 2755309 {end}
Rome has more people: 2755309, and Oslo has 717710.
{stop}

Tools:
weather(place="...", day=0): The weather at a place, in so many days.
Request: How will the weather be in Bergen tomorrow?
Answer:
{call} 1 {head} weather(place="Bergen", day=1) {end}
I look up the forecast for Bergen.
{trap} {end}
{interrupt} 1 {head} rain, 9 degrees {end}
Tomorrow it rains in Bergen, at 9 degrees.
{stop}

Tools:
author(book="..."): Who wrote a book.
born(person="..."): The year in which a person was born.
Request: When was the author of Emma born?
Answer:
{call} 1 {head} author(book="Emma") {end}
{trap} {end}
{interrupt} 1 {head} Jane Austen {end}
{call} 2 {head} born(person="Jane Austen") {end}
{trap} {end}
{interrupt} 2 {head} 1775 {end}
Jane Austen, the author of Emma, was born in 1775.
{stop}

Tools:
stock(item="..."): How many of an item there are.
Request: How many lamps and chairs are there?
Answer:
{call} 1 {head} stock(item="lamp") {end}
{call} 2 {head} stock(item="chair") {end}
{trap} {end}
{interrupt} 1 {head} 7 {end}{interrupt} 2 {head} error: no such item {end}
There are 7 lamps. I could not find out how many chairs there are.
{stop}
"""

_VALUES = {"string": '"..."', "integer": "0", "number": "0.0", "boolean": "True", "array": "[]", "object": "{}"}
"""How an argument is written, by the type of its schema."""


def markup_prompt(tools: Iterable[ChatToolLike], request: str, delimiters: Delimiters = DELIMITERS) -> str:
    """Write a prompt for `LLM.generate(…, tools=…, async_calls=…)`. The answer begins at its end; generate with `stop=STOP`.

    Raises `RequestError` if a tool is invalid, two tools have the same name, or the request is no text.

    Args:
        tools: the tools that the model may call, as a chat takes them.
        request: the user's request. Delimiters in it are escaped.
    """
    if not isinstance(request, str) or not request.strip():
        raise RequestError("request must be a text that is not empty", got=shown(request), fix="say what is wanted")
    words = {**delimiters._asdict(), "stop": STOP}
    declared = "\n".join(map(_line, chat_tools(tools)))
    return f"{(_HEAD + _EXAMPLES).format_map(words)}\nTools:\n{declared}\nRequest: {escape(request, delimiters)}\nAnswer:\n"


def _line(tool: ChatTool) -> str:
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    arguments = ", ".join(f"{name}={_VALUES.get(schema.get('type'), '...')}" for name, schema in properties.items())
    description = " ".join(str(tool.declaration["function"].get("description") or "").split())
    return f"{tool.name}({arguments}): {description}" if description else f"{tool.name}({arguments})"
