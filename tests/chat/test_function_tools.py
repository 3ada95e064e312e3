"""Python functions as tools: their declarations, also those without what OpenAI leaves optional, arguments and values."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache, partial, singledispatch
from typing import Any, Literal, Required, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.calls import READER, Tool
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.chat.template import ChatTemplate
from jinfercept.errors import RequestError
from tests.support.scripted_model import byte_tokenizer


@dataclass
class Place:
    city: str
    country: str = "France"


def weather(place: Place, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """What the weather will be.

    Args:
        place: where
        days: how many days
          from now
    """
    return {"city": place.city, "days": days, "unit": unit}


async def later(text: str) -> str:
    """Answers later."""
    await asyncio.sleep(0)
    return text


def only(*tools: Any) -> ChatTool:
    [tool] = chat_tools(tools)
    return tool


def call(tool: ChatTool, arguments: str) -> object:
    assert tool.tool is not None
    return tool.tool.function(arguments)


def test_a_function_is_declared_by_signature_and_docstring() -> None:
    declared = only(weather).declaration
    assert declared["type"] == "function"
    function = declared["function"]
    assert (function["name"], function["description"]) == ("weather", "What the weather will be.")
    parameters = function["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["properties"]["days"] == {
        "type": "integer",
        "default": 1,
        "description": "how many days from now",
    }
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert parameters["properties"]["place"]["description"] == "where"


def test_arguments_become_what_the_annotations_say_and_results_text() -> None:
    arguments = '{"place": {"city": "Paris"}, "days": "2"}'
    assert call(only(weather), arguments) == '{"city":"Paris","days":2,"unit":"C"}'
    assert call(only(Tool(lambda: None, name="f")), "{}") == ""
    assert call(only(Tool(lambda: [1, 2], name="f")), "{}") == "[1,2]"
    values = iter((np.array([1, 2]), jnp.array([1, 2]), [np.int64(1), 2]))
    for _ in range(3):
        assert call(only(Tool(lambda: {"x": next(values)}, name="f")), "{}") == '{"x":[1,2]}'


def test_whatever_can_be_called_by_name_is_a_tool() -> None:
    class Adder:
        def __init__(self, offset: int) -> None:
            self.offset = offset

        def add(self, x: int) -> int:
            return self.offset + x

        __call__ = add

    half = partial(weather, unit="F")
    for tool, arguments, result in (
        (Adder(2).add, '{"x": 3}', "5"),
        (Tool(Adder(2), name="adder", timeout_s=3), '{"x": 3}', "5"),
        (Tool(half, name="half"), '{"place": {"city": "Rome"}}', '{"city":"Rome","days":1,"unit":"F"}'),
    ):
        assert call(only(tool), arguments) == result
    adder = only(Tool(Adder(2), name="adder", timeout_s=3))
    assert adder.tool is not None
    assert (adder.name, adder.tool.timeout_s) == ("adder", 3)


def test_an_async_function_is_awaited() -> None:
    value: Any = call(only(later), '{"text": "now"}')
    assert asyncio.run(value) == "now"


def test_a_declaration_is_taken_with_and_without_its_envelope() -> None:
    function = {"name": "buy", "parameters": {"type": "object", "properties": {}}}
    for given in (function, {"type": "function", "function": function}):
        tool = only(given)
        assert tool.declaration == {"type": "function", "function": function}
        assert tool.tool is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ('{"place": "Paris"}', "place: Input should be a dictionary or an instance of Place"),
        ('{"place": {"city": "Paris"}, "unit": "K"}', "unit: Input should be 'C' or 'F'"),
        ("{'place': 1}", "not JSON"),
        ("3", "no object"),
        ("", "not JSON"),
    ],
)
def test_arguments_that_do_not_fit_say_why(arguments: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        call(only(weather), arguments)


def test_no_tool_has_the_name_under_which_readers_are_counted() -> None:
    for make in (
        lambda: Tool(str, name=READER),
        lambda: chat_tools([{"name": READER}]),
        lambda: chat_tools([{"type": "function", "function": {"name": READER}}]),
    ):
        with pytest.raises(RequestError, match="a tool's name must be a text other than <reader>"):
            make()
    assert Tool(lambda text: text).name == "<lambda>"


def test_what_an_asynchronous_function_gives_is_read_to_its_end() -> None:
    async def numbers(first: int) -> AsyncIterator[int]:
        yield first
        yield first + 1

    async def nested(text: str) -> Any:
        return later(text)

    assert asyncio.run(_awaited(call(only(numbers), '{"first": 1}'))) == "[1,2]"
    assert asyncio.run(_awaited(call(only(nested), '{"text": "a"}'))) == "a"


async def _awaited(value: Any) -> object:
    return await value


def test_a_generator_is_its_values_unless_it_never_ends() -> None:
    def count(most: int) -> Iterator[int]:
        yield from range(most)

    assert call(only(count), '{"most": 3}') == "[0,1,2]"
    with pytest.raises(RequestError, match="a generator of more than 65536 values"):
        call(only(count), f'{{"most": {10**30}}}')


def test_a_process_may_end_while_a_function_runs_in_a_thread() -> None:
    code = """
        import threading, time
        from jinfercept.chat.function_tools import chat_tools

        began = threading.Event()

        def hangs() -> None:
            began.set()
            while True:
                time.sleep(0.01)

        [tool] = chat_tools([hangs])
        threading.Thread(target=tool.tool.function, args=("{}",), daemon=True).start()
        began.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["<lambda>", "</tool_call>", "a\nb", 'a"b'])
def test_a_name_that_is_markup_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="cannot write the name"):
        only(Tool(lambda: "", name=name))


def test_a_function_of_any_arguments_gets_any() -> None:
    def anything(**values: Any) -> str:
        return ",".join(sorted(values))

    assert only(anything).declaration["function"]["parameters"]["additionalProperties"] is True
    assert call(only(anything), '{"b": 1, "a": 2}') == "a,b"


def test_cached_and_dispatching_functions_and_typed_others_are_called_as_declared() -> None:
    class Options(TypedDict, total=False):
        days: Required[int]
        exact: bool

    @cache
    def cached(x: int) -> str:
        return f"cached {x}"

    @singledispatch
    def dispatched(x: int, y: int = 3) -> str:
        return f"{x} of {y}"

    def others(place: str, **options: Unpack[Options]) -> str:
        return f"{place} {options}"

    tools = chat_tools([cached, dispatched, others, partial(others, place="here")])
    texts = ('{"x": 1}', '{"y": 4, "x": 1}', '{"place": "Rome", "days": 2}', '{"days": 5}')
    results = [tool.tool.function(text) for tool, text in zip(tools, texts, strict=True) if tool.tool]
    assert results == ["cached 1", "1 of 4", "Rome {'days': 2}", "here {'days': 5}"]
    declared = tools[2].parameters
    assert (sorted(declared["properties"]), sorted(declared["required"])) == (
        ["days", "exact", "place"],
        ["days", "place"],
    )
    assert declared["additionalProperties"] is False


def test_an_object_whose_own_methods_raise_is_refused_with_a_reason() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise ValueError

    class Hidden:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError

        def __call__(self, x: int) -> int:
            return x

    for wrong in ([Silent()], Silent(), [Hidden()]):
        with pytest.raises(RequestError):
            chat_tools(wrong)  # pyright: ignore[reportArgumentType]


FUNCTION = "{% for tool in tools %}{% set f = tool.function %}"
DESCRIBED = FUNCTION + "{{ f.name + ': ' + f.description + '\\n' }}{% endfor %}"
WITH_PARAMETERS = FUNCTION + "{{ f.parameters.properties.items() | list | length }}{% endfor %}"
AS_JSON = FUNCTION + "{{ f.parameters | tojson }}{% endfor %}"
DESCRIBED_PROPERTIES = (
    FUNCTION + "{% for name, p in f.parameters.properties.items() %}{{ name + ': ' + p.description }}"
    "{% if 'items' in p %}{{ ' of ' + p['items'].get('type', 'any') }}{% endif %} {% endfor %}{% endfor %}"
)
TYPED_PROPERTIES = (
    FUNCTION + "{% for name, p in f.parameters.properties.items() %}{{ name + ': ' + p.type }} {% endfor %}{% endfor %}"
)


def declared(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "price", **fields}}


def of(**properties: Any) -> dict[str, Any]:
    return declared(parameters={"type": "object", "properties": properties, "required": None})


def prompt(source: str, *tools: dict[str, Any]) -> str:
    template = ChatTemplate(byte_tokenizer(None), tools, source, {}, ())
    return template.render([{"role": "user", "content": "?"}]).strip()


@pytest.mark.parametrize(
    ("source", "tool", "written"),
    [
        (DESCRIBED, declared(), "price:"),
        (DESCRIBED, declared(description=None), "price:"),
        (WITH_PARAMETERS, declared(description="d"), "0"),
        (WITH_PARAMETERS, declared(parameters=None), "0"),
        (WITH_PARAMETERS, declared(parameters={}), "0"),
        (AS_JSON, declared(), '{"type": "object", "properties": {}}'),
        (DESCRIBED_PROPERTIES, of(a={"type": "string"}, b=True), "a:  b:"),
        (DESCRIBED_PROPERTIES, of(a={"items": True}, b={"description": 5}), "a:  of any b: 5"),
        (DESCRIBED_PROPERTIES, of(a={"items": [{"type": "number"}]}), "a:  of number"),
        (TYPED_PROPERTIES, of(a={"type": ["null", "string"]}, b={"type": "number"}), "a: string b: number"),
        (TYPED_PROPERTIES, of(a={"anyOf": [{"type": "null"}, {"type": "integer"}]}, b=True), "a: integer b: string"),
    ],
)
def test_a_template_that_reads_what_a_declaration_lacks_has_it_filled(
    source: str, tool: dict[str, Any], written: str
) -> None:
    assert prompt(source, tool) == written


def test_a_template_that_takes_declarations_as_they_are_has_them_so() -> None:
    tool = of(a={"type": ["string", "null"]}, b=True)
    as_given = '{"name": "price", "parameters": {"type": "object", "properties": '
    as_given += '{"a": {"type": ["string", "null"]}, "b": true}, "required": null}}'
    assert prompt(FUNCTION + "{{ f | tojson }}{% endfor %}", tool) == as_given


def test_tools_that_no_form_helps_are_named_in_the_error() -> None:
    never = "{% if tools %}{{ raise_exception('never') }}{% endif %}?"
    with pytest.raises(RequestError, match=r"does not take these tools; got .*never"):
        prompt(never, declared())
    with pytest.raises(RequestError, match="fails on a simple question"):
        prompt("{{ raise_exception('never') }}", declared())


def test_declarations_that_are_nested_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError):
        prompt(DESCRIBED, of(a=schema))
