"""Python functions as a chat's tools: declarations, checked arguments, and return values as text.

Declarations are OpenAI's. The caller runs the tools that are declared without a function.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any, Unpack, get_origin, get_type_hints

from jinfercept.calls import Tool, check_tool_name
from jinfercept.errors import RequestError, describe_failure, shown
from jinfercept.values import plain, strict_json

_NAME = re.compile(r'[^<>\[\]"\\\x00-\x1f]+')
"""Names that no format of calls takes for its markup."""
_Cached = type(cache(len))
_MOST_VALUES = 2**16
"""Values of a generator that are a result. One that never ends would fill the memory."""


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A tool of a chat."""

    # `{"type": "function", "function": {"name": …, "description": …, "parameters": <JSON schema>}}`
    declaration: Mapping[str, Any]
    tool: Tool | None  # runs the tool, from a JSON object as text; None: the caller runs it
    is_deferred: bool = False  # a message of the conversation declares the tool, and the template does not

    @property
    def name(self) -> str:
        return self.declaration["function"]["name"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments; {} if none is declared."""
        schema = self.declaration["function"].get("parameters")
        return schema if isinstance(schema, Mapping) else {}


ChatToolLike = Callable[..., object] | Tool | Mapping[str, Any] | ChatTool
"""A Python function; a `Tool`, whose function is called with the declared arguments; an OpenAI-style JSON declaration; or a
`ChatTool`."""


def chat_tools(tools: Iterable[ChatToolLike] | None) -> list[ChatTool]:
    """Convert tools for a chat. Raises `RequestError` for invalid tools, and for two tools with the same name."""
    if tools is None:
        return []
    if isinstance(tools, str | Mapping | Tool) or not isinstance(tools, Iterable):
        raise RequestError("tools is a list", got=shown(tools), fix="tools=[function]")
    listed = [_chat_tool(tool) for tool in tools]
    names = [tool.name for tool in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError("two tools have one name", got=", ".join(twice), fix="give one of them another name")
    return listed


def _chat_tool(tool: object) -> ChatTool:
    if isinstance(tool, ChatTool):
        return tool
    if isinstance(tool, Mapping):
        return ChatTool(_declaration(tool), None)
    if isinstance(tool, Tool):
        return _from_function(tool.function, tool)
    if callable(tool):
        return _from_function(tool, Tool(tool))
    raise RequestError("this is not a tool", got=shown(tool), fix="give Python functions or JSON declarations")


def _declaration(declaration: Mapping[str, Any]) -> Mapping[str, Any]:
    # clients may leave out the `{"type": "function"}` around it
    function = declaration.get("function", declaration)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(
            "the declaration of a tool must have a name",
            got=shown(declaration),
            fix='{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}',
        )
    check_tool_name(function["name"])
    if not isinstance(function.get("parameters"), Mapping | None):
        raise RequestError(
            f"the parameters of tool {function['name']!r} are not a JSON schema",
            got=shown(function["parameters"]),
            fix='{"type": "object", "properties": {…}}',
        )
    return {"type": "function", "function": dict(function)}


def _from_function(function: Callable[..., object], tool: Tool) -> ChatTool:
    if not _NAME.fullmatch(tool.name):
        raise RequestError(
            "a model cannot write the name of this tool", got=shown(tool.name), fix="give it one: Tool(…, name=…)"
        )
    try:
        annotated = _annotated(function)
        declaration = _declare(annotated, tool.name)
        return ChatTool(declaration, replace(tool, function=_checked(function, annotated, tool.name)))
    except RequestError:
        raise
    except Exception as error:  # annotations, and what an object says of itself, may be anything
        raise RequestError(
            f"the arguments of tool {tool.name!r} have no JSON schema",
            got=describe_failure(error).splitlines()[0][:200],
            fix="wrap it in a function whose arguments are annotated with str, int, float, bool, Literal, lists, dicts or "
            "dataclasses",
        ) from error


def _annotated(function: Callable[..., object]) -> Callable[..., object]:
    if isinstance(function, _Cached):
        return inspect.unwrap(function)
    if inspect.isroutine(function) or hasattr(function, "func"):
        return function
    return function.__call__  # an object that can be called


def _declare(function: Callable[..., object], name: str) -> Mapping[str, Any]:
    import docstring_parser
    from pydantic import TypeAdapter

    parameters = TypeAdapter[object](function).json_schema()  # pyright: ignore[reportArgumentType] # functions are types to it
    if parameters.get("type") != "object" or "properties" not in parameters:
        raise RequestError(
            f"tool {name!r} cannot be called by the names of its arguments",
            got=str(inspect.signature(function)),
            fix="no positional-only arguments, no *args",
        )
    _declare_others(function, parameters)
    try:
        documented = docstring_parser.parse(inspect.getdoc(function) or "")
    except docstring_parser.ParseError:  # a text in no known style
        documented = docstring_parser.Docstring()
        documented.short_description = inspect.getdoc(function)
    described = {argument.arg_name: argument.description or "" for argument in documented.params}
    for key, schema in parameters["properties"].items():
        schema.pop("title", None)
        if text := " ".join(described.get(key, "").split()):
            schema.setdefault("description", text)
    return {
        "type": "function",
        "function": {"name": name, "description": (documented.description or "").strip(), "parameters": parameters},
    }


def _declare_others(function: Callable[..., object], parameters: dict[str, Any]) -> None:
    arguments = inspect.signature(function).parameters.values()
    keywords = next((argument for argument in arguments if argument.kind is argument.VAR_KEYWORD), None)
    if keywords is None:
        return
    declared = parameters.setdefault("additionalProperties", True)
    # `**others` are anything, values of one type, or the keys of `Unpack[SomeTypedDict]`
    if not isinstance(declared, dict) or get_origin(_hints(function).get(keywords.name)) is not Unpack:
        return
    if reference := declared.get("$ref"):
        declared = parameters["$defs"][reference.rpartition("/")[2]]
    parameters["properties"] |= declared["properties"]
    parameters["required"] = [*parameters.get("required", ()), *declared.get("required", ())]
    parameters["additionalProperties"] = declared.get("additionalProperties", False)


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    return _hints(function.func) if isinstance(function, partial) else get_type_hints(inspect.unwrap(function))


def _checked(function: Callable[..., object], annotated: Callable[..., object], name: str) -> Callable[[str], object]:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ArgsKwargs, SchemaValidator

    schema: Any = TypeAdapter[object](annotated).core_schema  # pyright: ignore[reportArgumentType] # as in `_declare`
    if schema["type"] == "definitions":
        schema = {**schema, "schema": schema["schema"]["arguments_schema"]}
    else:
        schema = schema["arguments_schema"]
    fitted = SchemaValidator(schema)
    signature = (
        inspect.signature(annotated) if hasattr(function, "dispatch") else None
    )  # `singledispatch` reads the first

    def call(arguments: str) -> object:
        try:
            args, more = fitted.validate_python(ArgsKwargs((), _object(arguments, name)))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
            # the model reads this message
            raise RequestError(f"the arguments of {name} do not fit", got=wrong, fix="call it again") from error
        if signature is not None:
            bound = signature.bind(*args, **more)
            args, more = bound.args, bound.kwargs
        value = function(*args, **more)  # not by pydantic: a thread that ends within native code aborts the process
        return _text_later(value) if inspect.isawaitable(value) or inspect.isasyncgen(value) else _text(value)

    async def call_later(arguments: str) -> object:
        return await _text_later(call(arguments))

    return call_later if inspect.iscoroutinefunction(function) else call


def _object(arguments: str, name: str) -> dict[str, Any]:
    try:
        values = strict_json(arguments)
    except (ValueError, RecursionError) as error:  # too many brackets are no JSONDecodeError
        raise RequestError(
            f"the arguments of {name} are not JSON", got=f"{arguments[:200]} ({error})", fix="write a JSON object"
        ) from error
    if not isinstance(values, dict):
        raise RequestError(f"the arguments of {name} are no object", got=arguments[:200], fix="write a JSON object")
    return values


def _text(value: object) -> str:
    from pydantic_core import to_json

    if value is None or isinstance(value, str):
        return value or ""
    if inspect.isgenerator(value):
        value = list(islice(value, _MOST_VALUES + 1))
        _check_number(len(value))
    return to_json(plain(value), fallback=_plain_or_text).decode()


def _plain_or_text(value: object) -> object:
    return str(value) if (numbers := plain(value)) is value else numbers


def _check_number(num_values: int) -> None:
    if num_values > _MOST_VALUES:
        raise RequestError(f"a generator of more than {_MOST_VALUES} values", got="even more", fix="return fewer")


async def _text_later(value: object) -> str:
    if inspect.isasyncgen(value):
        values: list[object] = []
        async for item in value:
            values.append(item)
            _check_number(len(values))
        return _text(values)
    while inspect.isawaitable(value):
        value = await value
    return _text(value)
